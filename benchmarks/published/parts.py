"""Two parts of a table: rows that may set constants and show mechanisms, and rows that tell how
large errors are. Only tables of this repository have the first: others are given to report on.

A configuration (model, count and kind of GPUs) is of one part whatever release ran it, so that what
was learned of it in one row is not reported of another.
"""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from benchmarks.published.measured import part_of

CALIBRATION, REPORT = "calibration", "report"
PARTS = (CALIBRATION, REPORT)


def part_of_run(raw: Mapping[str, Any]) -> str:
    """Returns the part that a row is of: by the lowest bit of CRC-32 of "MODEL on COUNT GPU"."""
    hardware = part_of(raw, "hardware")
    name = part_of(raw, "model").get("name")
    key = f"{name} on {hardware.get('gpus')} {hardware.get('gpu')}"
    return PARTS[crc32(key.encode()) & 1]
