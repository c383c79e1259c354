"""Plays a schedule against stage costs."""
