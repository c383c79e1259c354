"""Cost of a stage on its devices: blocks, synchronisation, borders, the end of a step."""
