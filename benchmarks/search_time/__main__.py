"""Runs `benchmarks.search_time.main`."""

from benchmarks.search_time.main import main

if __name__ == "__main__":
    main()
