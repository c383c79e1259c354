"""Tiles of kernels whose size is a choice and no rule: for each kind of device, in `choices.json`.

Launches take them from there alone. `python -m benchmarks.tiles` makes the file; each choice says
what it comes from: `count`, of machine code, or the device that it was measured on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError

ANY = "any"
"""Devices that have no choices of their own."""
SCHEMA = "meshwright.tiles/1"


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a kernel makes at a time."""

    item_bytes: int
    """Of a value of the operands."""
    most_columns: int | None
    """Results that are wider have another; None: all others."""
    rows: int
    columns: int
    depth: int
    """Of each operand, held at a time."""
    warps: int
    stages: int
    """Of these, under way at once."""
    source: str
    """`count`, or the device that it was measured on."""

    @property
    def constants(self) -> dict[str, int]:
        """Give them as kernels call them."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}

    @property
    def launch(self) -> dict[str, int]:
        """Give all that a launch is told."""
        return {**self.constants, "num_warps": self.warps, "num_stages": self.stages}


Choices = Mapping[str, Mapping[str, tuple[Tile, ...]]]
"""Device, then kernel, to tiles from the narrowest results on."""


def read_choices(text: str) -> Choices:
    """Read a file's text; PlanError if it is none."""
    try:
        data: Any = json.loads(text)
        if data["schema"] != SCHEMA:
            raise PlanError(f"tiles: schema {data['schema']!r} is not {SCHEMA!r}")
        return {
            device: {kernel: tuple([Tile(**one) for one in tiles]) for kernel, tiles in own.items()}
            for device, own in data["devices"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"tiles: {error} ({type(error).__name__})") from error


@cache
def choices() -> Choices:
    """The file that ships."""
    return read_choices(files(__name__).joinpath("choices.json").read_text())


def device_of(x: Tensor) -> str:
    """The kind of a tensor's device, such as sm_90; `any` where there are no choices for it."""
    if not x.is_cuda:
        return ANY
    major, minor = torch.cuda.get_device_capability(x.device)
    name = f"sm_{major}{minor}"
    return name if name in choices() else ANY


@cache
def tile(device: str, kernel: str, item_bytes: int, columns: int) -> Tile | None:
    """The choice for results of so many columns; None where the device has no such kernel."""
    for one in choices()[device].get(kernel, ()):
        wide = one.most_columns is not None and columns > one.most_columns
        if one.item_bytes == item_bytes and not wide:
            return one
    return None
