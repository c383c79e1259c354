"""Across blocks: cuts, devices, meshes, shares and recompute, found by bounds and tables."""
