"""Plans for models with embedding tables against plain data parallelism, DDP and torchrec."""
