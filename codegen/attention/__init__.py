"""Attention over keys that several ranks hold."""
