"""Seconds and memory of searches, and how they grow."""
