"""Ops that must know the mesh."""
