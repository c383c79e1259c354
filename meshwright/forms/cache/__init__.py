"""Some rows of a table on the device, all of them on its host: which, and how they come and go."""
