"""Messages of a step between stages."""
