"""Runs `benchmarks.zoo.main`."""

from benchmarks.zoo.main import main

if __name__ == "__main__":
    main()
