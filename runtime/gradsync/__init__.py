"""How replicas agree on gradients, one way per file; each has `build(slots, lines)`."""
