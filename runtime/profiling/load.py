"""Computation to go beside communication, or before it: small pieces of what training does.

On CPUs it has to read as much memory as training does: a process that gives its core up for a
moment comes back to caches that others have filled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch.nn import functional

_SOME = {"cpu": (6, 18), "cuda": (1, 4)}
"""Pieces: 3-9 ms on a CPU core, 0.1-0.4 ms on a GPU."""
_CALLS = {"cpu": 1, "cuda": 100}
"""Pieces between two looks at the clock."""
WINDOW_S = 0.04
_LOOKED_AT = 32
_ROWS, _WIDTH, _WEIGHTS = 48, 384, 16
"""Of layers on a CPU: their weights fill more than the caches of a core."""


class BusyLoad:
    """Pieces of about 0.5 ms on a CPU core, of about 0.1 ms on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._turn = device, 0
        self._some = _SOME[device.type]
        self._random = Random(0)
        if device.type == "cpu":
            shapes = [(_WIDTH, 2 * _WIDTH)] * _WEIGHTS
            self._x = torch.ones(_ROWS, _WIDTH)
        else:
            shapes = [(3072, 3072)]
            self._x = torch.ones(shapes[0], device=device, dtype=torch.bfloat16)
            self._long = torch.ones(2**24, device=device)
        self._weights = [
            torch.ones(shape, device=device, dtype=self._x.dtype) / shape[0] for shape in shapes
        ]

    def unit(self) -> None:
        """One piece: a layer, after whose like others come before its turn is again; on a GPU a
        product, and a stream through more than the innermost caches hold."""
        if self.device.type != "cpu":
            torch.matmul(self._x, self._weights[0])
            self._long.add_(1.0)
            return
        weight = self._weights[self._turn % _WEIGHTS]
        self._turn += 1
        torch.matmul(functional.gelu(torch.matmul(self._x, weight)), weight.t())

    def unit_s(self) -> float:
        """What a piece takes now, at the middle of some, on a CPU."""
        taken = []
        for _ in range(_LOOKED_AT):
            start = perf_counter()
            self.unit()
            taken.append(perf_counter() - start)
        return median(taken)

    def begin(self) -> None:
        """From here on all ranks draw the same amounts, whatever each has drawn before."""
        self._random = Random(0)

    def some(self) -> int:
        """A few milliseconds of it, as much on every rank: members arrive as far apart as equal
        work lets them. Returns how many pieces that was.

        On CPUs the scheduler lets a process wait that has just used up its turn: after less
        computation collectives look quicker than they are in training.
        """
        count = self._random.randint(*self._some)
        for _ in range(count):
            self.unit()
        return count


@dataclass(frozen=True, slots=True)
class Pace:
    """What a piece takes while every rank computes and none communicates; the mean of all ranks."""

    wall_s: float
    busy_s: float
    """Processor time."""


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Of moments between which something was measured."""
    return Pace(mean(p.wall_s for p in paces), mean(p.busy_s for p in paces))


def measured_pace(load: BusyLoad, synchronize: Callable[[], None]) -> Pace:
    """Measured again and again: a machine's speed changes with time."""
    dist.barrier()
    synchronize()
    wall, busy, units = perf_counter(), process_time(), 0
    while perf_counter() < wall + WINDOW_S or not units:
        for _ in range(_CALLS[load.device.type]):
            load.unit()
            units += 1
        synchronize()
    taken = (perf_counter() - wall, process_time() - busy)
    found = torch.tensor(taken, dtype=torch.float64, device=load.device) / units
    dist.all_reduce(found)
    wall_s, busy_s = (found / dist.get_world_size()).tolist()
    return Pace(wall_s, busy_s)
