"""Programs that measure and compare; `python -m benchmarks` lists them."""
