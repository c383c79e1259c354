"""Searches for the fastest plan that fits."""
