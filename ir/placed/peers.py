"""What kernels on the memory of other ranks ask of those ranks and of values."""

MOST_RANKS = 8
"""GPUs of one host that see each other's memory."""
DTYPES = ("bfloat16", "float16", "float32")
"""Of products."""
MOST_WIDTH = 65_536
"""Elements of a row that one program holds."""
ONE_SHOT_BYTES = 256 * 1024
"""Up to so many bytes each rank reads the summands of all; an assumption, not measured."""
