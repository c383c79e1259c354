"""The driver of every search, and what it hands to users."""
