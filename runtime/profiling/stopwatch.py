"""Times what one process does by itself: processor time on a CPU, events on a GPU."""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Stopwatch(Protocol):
    """Times single calls."""

    def time(self, call: Callable[[], T]) -> tuple[T, float]:
        """What it returns, and its seconds."""
        ...


class CpuWatch:
    """Seconds of this thread on a core: they do not depend on who else wants the core.

    Autograd runs a CPU's backward in the thread that asks for it.
    """

    def time(self, call: Callable[[], T]) -> tuple[T, float]:
        start = thread_time()
        result = call()
        return result, thread_time() - start


class CudaWatch:
    """Seconds of the device with a cold L2 cache, or of the CPU that feeds it if that is longer."""

    def __init__(self, device: torch.device, *, host: bool = True) -> None:
        self.device, self.host = device, host
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._other = torch.empty(2 * max(cache, 2**24), dtype=torch.uint8, device=device)
        self._flushes = 1

    def time(self, call: Callable[[], T]) -> tuple[T, float]:
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        started = event(enable_timing=True)
        started.record()
        for _ in range(self._flushes):
            self._other.zero_()
        first.record()
        began = perf_counter()
        result = call()
        host_s = perf_counter() - began
        last.record()
        last.synchronize()
        self._queue(host_s, started.elapsed_time(first) / 1e3)
        device_s = first.elapsed_time(last) / 1e3
        return result, max(device_s, host_s) if self.host else device_s

    def _queue(self, host_s: float, flushed_s: float) -> None:
        """The next call finds the device busy for as long as the CPU needs to queue it."""
        one_s = max(flushed_s / self._flushes, 1e-6)
        self._flushes = max(1, min(2000, round(1.2 * host_s / one_s)))


def watch_for(device: torch.device, *, host: bool = True) -> Stopwatch:
    """`host`: on a GPU, count the CPU's time where it is longer than the kernels'."""
    return CudaWatch(device, host=host) if device.type == "cuda" else CpuWatch()
