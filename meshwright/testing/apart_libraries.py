"""Libraries that `make setup` puts beside the others, as they would be imported by whoever does not
need them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "apart"


def reach_apart() -> None:
    """Makes what lies apart importable in this process, behind all that is found already."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def with_library(name: str) -> None:
    """Makes a library that lies apart importable in this process; skips the test where it is not
    installed."""
    if find_spec(name) is None:
        reach_apart()
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make setup puts it into {FOLDER.name}")
