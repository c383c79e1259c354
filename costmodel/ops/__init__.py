"""Seconds of single ops: by formula, by curve, from a profile."""
