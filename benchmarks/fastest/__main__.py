"""Runs `benchmarks.fastest.main`."""

from benchmarks.fastest.main import main

if __name__ == "__main__":
    main()
