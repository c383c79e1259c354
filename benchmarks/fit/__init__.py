"""Fits devices and links to published timings, and writes presets."""
