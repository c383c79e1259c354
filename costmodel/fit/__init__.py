"""Measures machines, and fits devices and links to what was measured."""
