"""Runs `benchmarks.faults.main`."""

from benchmarks.faults.main import main

if __name__ == "__main__":
    raise SystemExit(main())
