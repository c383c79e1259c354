"""Where a plan's time and memory go, what binds it, why it won, and what would change it."""
