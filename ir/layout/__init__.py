"""Where parts of tensors lie on a mesh, and what brings them elsewhere."""
