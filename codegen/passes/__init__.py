"""Changes of a block's program that let collectives go on beside work."""
