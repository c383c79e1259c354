"""One file per change that is tried on the best plans of a search, where it is of no one pin; the
file name is its key."""
