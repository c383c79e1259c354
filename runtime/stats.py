"""What steps took: seconds per kind of action, seconds per step, peak memory."""

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from meshwright.ir.schedule import Work


@dataclass(eq=False)
class StepRecord:
    """One step of one rank. On CUDA an action's seconds are those of its stream."""

    device: torch.device
    step_s: float = 0.0
    peak_bytes: int = 0
    """Since the process started; on CUDA what torch had allocated, on CPU what was resident."""
    _spans: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _events: list[tuple[str, torch.Event, torch.Event]] = field(default_factory=list)

    @contextmanager
    def action(self, work: Work | str) -> Iterator[None]:
        """Times what runs within, waiting for messages included."""
        if self.device.type == "cuda":
            first, last = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((str(work), first, last))
        else:
            start = time.perf_counter()
            yield
            self._spans[str(work)].append(time.perf_counter() - start)

    def close(self, step_s: float) -> None:
        """Ends the step; the device must have finished it."""
        for work, first, last in self._events:
            self._spans[work].append(first.elapsed_time(last) / 1e3)
        self._events.clear()
        self.step_s, self.peak_bytes = step_s, peak_bytes(self.device)

    @property
    def action_s(self) -> dict[str, tuple[float, ...]]:
        """Kind of work (F, B, I, W, synchronise, optimizer) -> seconds of each, in order."""
        return {work: tuple(spans) for work, spans in self._spans.items()}


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(eq=False)
class Stats:
    """The records of the last steps, newest last."""

    steps: list[StepRecord] = field(default_factory=list)
    keep: int = 1000

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)
        del self.steps[: -self.keep]

    @property
    def step_s(self) -> list[float]:
        return [record.step_s for record in self.steps]

    @property
    def peak_bytes(self) -> int:
        return max((record.peak_bytes for record in self.steps), default=0)
