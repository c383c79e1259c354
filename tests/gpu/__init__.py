"""Tests that need a GPU, and the same bodies on the CPU at small sizes, so that they are sound."""
