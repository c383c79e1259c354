"""`python -m benchmarks.gpu`."""

from benchmarks.gpu.main import main

if __name__ == "__main__":
    main()
