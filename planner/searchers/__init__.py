"""One file per searcher; the file name is its key."""
