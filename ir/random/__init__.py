"""Random numbers that have a place each: the same whoever draws them, on whatever device."""
