"""One training step, from the batch to the optimizer."""
