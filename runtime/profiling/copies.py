"""Times copies between host and device memory, for offload; a CPU has one memory and no copies."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Literal

import torch

from meshwright.ir.profile.profile import CopyRecord
from meshwright.runtime.profiling.timings import timing

SIZES = tuple(4**i for i in range(5, 16))
"""1 KiB to 1 GiB."""
DIRECTIONS: tuple[Literal["to_device", "to_host", "within"], ...] = (
    "to_device",
    "to_host",
    "within",
)
_FEWEST, _MOST = 5, 50
_MEMORY_SHARE = 0.2


def copies_exist(device: torch.device) -> bool:
    """Whether the device has memory of its own: on CPUs there is nothing to measure."""
    return device.type == "cuda"


def measure_copies(
    device: torch.device, *, budget_s: float, sizes: Sequence[int] = SIZES
) -> Iterator[CopyRecord]:
    """Pinned host memory to the device, back, and within the device; nothing on a CPU.

    Sizes ascend until the budget is used up or a fifth of the device's free memory reached.
    """
    if not copies_exist(device):
        return
    limit = torch.cuda.mem_get_info(device)[0] * _MEMORY_SHARE
    held = [n for n in sizes if n <= limit]
    ends = perf_counter() + budget_s
    for done, nbytes in enumerate(held):
        share = (ends - perf_counter()) / (len(held) - done) / len(DIRECTIONS)
        if share <= 0:
            return
        yield from _sized(device, nbytes, share)


def _sized(device: torch.device, nbytes: int, share_s: float) -> Iterator[CopyRecord]:
    host = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: here.copy_(host, non_blocking=True),
        lambda: host.copy_(here, non_blocking=True),
        lambda: there.copy_(here),
    )
    for direction, call in zip(DIRECTIONS, calls, strict=True):
        seconds = _repeated(call, share_s)
        yield CopyRecord(direction=direction, nbytes=nbytes, time=timing(seconds))


def _repeated(call: Callable[[], Any], share_s: float) -> list[float]:
    event: Any = torch.cuda.Event
    call()
    torch.cuda.synchronize()
    ends = perf_counter() + share_s
    seconds: list[float] = []
    while len(seconds) < _FEWEST or (len(seconds) < _MOST and perf_counter() < ends):
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3)
    return seconds
