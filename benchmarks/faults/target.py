"""The model that is trained, and its batches, before one of which ranks have their fault."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.acts import FAULTS, WHERE

BATCH, WIDE_BATCH, _WIDE = 12, 96, 1024
AT = 6
"""The batch, counted from 0, before which ranks have their fault; every second step is saved."""
FAULT, KILLS = "FAULT_OF_RANKS", "FAULT_KILLS"
"""Variables: which fault, and how many ranks are killed at random."""
STEPS_A_KILL, _BATCH_S = 100, 0.01
"""A run of so many steps for each of the ranks that are killed in it, at random times. It goes no
further than the share of those that have been killed and the next one."""
KILLED_SO_FAR = "killed-so-far"
_CALM_S = 10.0
"""That the ranks have trained for when the fault comes: by then a supervisor has spares, and the
plan for less."""


class Net(nn.Module):
    """Small, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.a(x)))
        h = self.drop(torch.tanh(self.b(h))) + h
        return ((self.c(h) - y) ** 2).sum() / x.shape[0]


class WideNet(nn.Module):
    """Computes for some hundredths of a second, so that it matters where."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = (nn.Linear(8, _WIDE), nn.Linear(_WIDE, _WIDE), nn.Linear(_WIDE, _WIDE))
        self.layers = nn.Sequential(*(layer for each in wide for layer in (each, nn.Tanh())))
        self.last = nn.Linear(_WIDE, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.last(self.layers(x)) - y) ** 2).sum() / x.shape[0]


def model() -> Any:
    """A target of `meshwright`."""
    return Net().double(), _batch(0, BATCH)


def wide_model() -> Any:
    """Another one."""
    return WideNet().double(), _batch(0, WIDE_BATCH)


def _batch(number: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 4, generator=generator, dtype=torch.float64)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, and the fault that the environment asks for on this rank of this start."""
    start, rank = os.environ.get("MESHWRIGHT_STARTED", "0"), os.environ.get("RANK", "0")
    fault = FAULTS.get(os.environ.get(FAULT, ""))
    size = WIDE_BATCH if fault and fault.wide else BATCH
    for number in range(10**6):
        x, y = _batch(number, size)
        time.sleep(0.5 if fault and fault.in_memory and 0 < number < AT else 0.0)
        time.sleep(_BATCH_S if KILLS in os.environ else 0.0)
        while _killed() < min(int(os.environ.get(KILLS, "0")), number // STEPS_A_KILL):
            time.sleep(_BATCH_S)
        if fault and number == AT and (int(start), int(rank)) in fault.places:
            happened = Path(os.environ[WHERE], "happened")
            if not happened.exists():
                time.sleep(_CALM_S * ("--hang" not in fault.more))
                happened.write_text(str(time.time()))
            fault.act(x)
        time.sleep(fault.pause_s if fault and start != "0" and number >= AT else 0.0)
        yield x, y


def _killed() -> int:
    """Ranks that have been killed; none where nobody counts them."""
    path = Path(os.environ.get(WHERE, ""), KILLED_SO_FAR)
    return path.stat().st_size if path.is_file() else 0
