"""One file per change that is tried on the best plans of a search; the file name is its key."""
