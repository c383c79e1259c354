"""Cost of a block: its ops in order, conversions between them, what its backward needs."""
