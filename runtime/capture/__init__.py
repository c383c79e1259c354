"""Calls of blocks that are recorded once, at fixed addresses, and replayed."""
