"""Runs `benchmarks.accuracy.main`."""

from benchmarks.accuracy.main import main

if __name__ == "__main__":
    main()
