"""Messages between processes that several layers know of."""
