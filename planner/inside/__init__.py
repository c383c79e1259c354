"""Inside a block: how its ops, parameters and borders lie on a mesh, chosen together."""
