"""Plans of GPUs on GPUs that are not there: waits, races, two devices in one operator."""
