"""Programs as readable Python."""
