"""Plans run in turns, to find the fastest."""
