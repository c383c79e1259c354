"""Fits curves of devices and links to what was measured: pure functions, which measure nothing."""
