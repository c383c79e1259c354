"""Computation to go beside communication, or before it: small pieces of what training does."""

from collections.abc import Callable
from random import Random
from time import perf_counter

import torch
import torch.distributed as dist

_SOME_S = {"cpu": (2e-3, 6e-3), "cuda": (1e-4, 4e-4)}
_CALLS = 200


class Load:
    """Pieces of about 0.1 ms on a CPU core, of about 0.1 ms on a GPU."""

    def __init__(self, device: torch.device) -> None:
        side, dtype = (160, torch.float32) if device.type == "cpu" else (3072, torch.bfloat16)
        self._a = torch.ones(side, side, device=device, dtype=dtype) / side
        self._b = torch.empty_like(self._a)
        # Streams through more than the innermost caches hold, as training does.
        self._long = torch.ones(2**16 if device.type == "cpu" else 2**24, device=device)
        self._some_s = _SOME_S[device.type]
        self._random = Random(dist.get_rank())

    def unit(self) -> None:
        """One piece."""
        torch.matmul(self._a, self._a, out=self._b)
        self._long.add_(1.0)

    def some(self) -> None:
        """A few milliseconds of it, another time on every rank, so members arrive one by one.

        On CPUs the scheduler lets a process wait that has just used up its turn: after less
        computation collectives look quicker than they are in training.
        """
        ends = perf_counter() + self._random.uniform(*self._some_s)
        while perf_counter() < ends:
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
