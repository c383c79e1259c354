"""A GPU that is not there: for tests of what the host does beside one."""
