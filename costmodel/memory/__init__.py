"""Bytes that ranks hold, and when."""
