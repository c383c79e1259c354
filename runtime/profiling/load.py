"""Computation to go beside communication, or before it: small pieces of what training does."""

from collections.abc import Callable
from random import Random
from time import perf_counter

import torch
import torch.distributed as dist

_SOME = {"cpu": (20, 60), "cuda": (1, 4)}
"""Pieces: 2-6 ms on a CPU core, 0.1-0.4 ms on a GPU."""
_CALLS = 200


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

    def some(self) -> None:
        """A few milliseconds of it, as much on every rank: members arrive as far apart as equal
        work lets them.

        On CPUs the scheduler lets a process wait that has just used up its turn: after less
        computation collectives look quicker than they are in training.
        """
        for _ in range(self._random.randint(*self._some)):
            self.unit()


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
