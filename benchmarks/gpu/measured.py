"""Times steps and reads memory, on a GPU or, in a rehearsal, on a CPU."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.step import Fact, Place
from benchmarks.gpu.workloads import Batch

Train = Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What some steps took."""

    first_s: float
    """With what is made at the first step: kernels, caches."""
    step_s: float
    """The middle one of steps that are waited for, each by itself."""
    chained_s: float
    """Mean of steps of which only the last is waited for: the host may run ahead."""
    loss: float
    """Of the first step."""
    allocated_bytes: int
    """Most at once in tensors; 0 on a CPU."""
    reserved_bytes: int
    """Most that the allocator took from the device."""

    def facts(self, row: str, prefix: str = "") -> Iterator[Fact]:
        """Yields them for a row of the table."""
        for name in ("first_s", "step_s", "chained_s", "loss"):
            yield f"{row}/{prefix}{name}", getattr(self, name)
        if self.reserved_bytes:
            yield f"{row}/{prefix}allocated_bytes", self.allocated_bytes
            yield f"{row}/{prefix}reserved_bytes", self.reserved_bytes


def wait(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Gives back what nothing holds any more, and forgets the peaks."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def time_steps(train: Train, batch: Batch, place: Place, count: int = 10) -> Steps:
    """Three steps to warm up, then `count` one by one, then as many in a chain."""
    count = place.of(count, 2)

    def timed(number: int) -> tuple[float, Tensor]:
        begun = time.perf_counter()
        loss: Any = None
        for _ in range(number):
            loss = train(batch)
        wait(place.device)
        return time.perf_counter() - begun, loss

    wait(place.device)
    first_s, loss = timed(1)
    timed(place.of(2, 1))
    alone = [timed(1)[0] for _ in range(count)]
    chained_s = timed(count)[0] / count
    cuda = place.device == "cuda"
    return Steps(
        first_s=first_s, step_s=median(alone), chained_s=chained_s, loss=float(loss),
        allocated_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
    )  # fmt: skip
