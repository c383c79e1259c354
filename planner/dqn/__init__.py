"""Plans by reinforcement learning: decisions, environments around them, and their agent."""
