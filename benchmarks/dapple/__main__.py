"""Runs `benchmarks.dapple.main`."""

from benchmarks.dapple.main import main

if __name__ == "__main__":
    main()
