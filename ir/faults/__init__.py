"""How often machines fail, and how often a job should save: data and formulas."""
