"""Jobs under `meshwright run --elastic` whose ranks and nodes have faults."""
