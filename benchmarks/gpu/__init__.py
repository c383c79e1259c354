"""The day a GPU is there: one command that measures what the docs claim of GPUs."""
