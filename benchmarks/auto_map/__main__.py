"""Runs `benchmarks.auto_map.main`."""

from benchmarks.auto_map.main import main

if __name__ == "__main__":
    main()
