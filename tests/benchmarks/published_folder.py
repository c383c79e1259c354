"""Where published rows lie that no constant has seen."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tables"
