"""Predicts time and memory of a plan on a cluster."""
