"""Runs `benchmarks.embrace.main`."""

from benchmarks.embrace.main import main

if __name__ == "__main__":
    main()
