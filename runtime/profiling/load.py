"""Computation to go beside communication, or before it: small pieces of what training does."""

from collections.abc import Callable
from random import Random
from time import perf_counter

import torch
import torch.distributed as dist

_SOME = {"cpu": (30, 90), "cuda": (1, 4)}
"""Pieces: 3-9 ms on a CPU core, 0.1-0.4 ms on a GPU."""
_CALLS = 200
_WINDOW_S = 0.05


class Load:
    """Pieces of about 0.1 ms on a CPU core, of about 0.1 ms on a GPU."""

    def __init__(self, device: torch.device) -> None:
        side, dtype = (160, torch.float32) if device.type == "cpu" else (3072, torch.bfloat16)
        self._a = torch.ones(side, side, device=device, dtype=dtype) / side
        self._b = torch.empty_like(self._a)
        # Streams through more than the innermost caches hold, as training does.
        self._long = torch.ones(2**16 if device.type == "cpu" else 2**24, device=device)
        self._some = _SOME[device.type]
        self._random = Random(0)

    def unit(self) -> None:
        """One piece."""
        torch.matmul(self._a, self._a, out=self._b)
        self._long.add_(1.0)

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


def measured_unit_s(load: Load, synchronize: Callable[[], None]) -> float:
    """Seconds of one piece while every rank computes."""
    for _ in range(_CALLS // 10):
        load.unit()
    dist.barrier()
    synchronize()
    start = perf_counter()
    for _ in range(_CALLS):
        load.unit()
    synchronize()
    return (perf_counter() - start) / _CALLS


def crowded_unit_s(load: Load) -> float:
    """The same on CPUs that ranks may share: all compute for a while, whoever is quicker does more.
    It is the group's mean."""
    dist.barrier()
    start, units = perf_counter(), 0
    while perf_counter() < start + _WINDOW_S:
        load.unit()
        units += 1
    found = torch.tensor((perf_counter() - start) / units, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()
