"""Runs `benchmarks.dear.main`."""

from benchmarks.dear.main import main

if __name__ == "__main__":
    main()
