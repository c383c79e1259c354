"""What is measured, and in which order: for `meshwright profile`, and for a cluster of CPUs."""
