"""Predicted against measured steps on this machine."""
