"""What was measured on machines, and what a run leaves behind."""
