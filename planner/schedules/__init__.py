"""One file per pipeline schedule; the file name is its key."""
