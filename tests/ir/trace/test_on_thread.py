"""What a trace does to clocks and random numbers is seen by its own thread only."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.ir.trace.chance import clocks, extreme_draws
from meshwright.ir.trace.moving import watched
from meshwright.ir.trace.on_thread import replaced_here
from meshwright.ir.trace.trace import trace


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives on another thread."""
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_read_the_right_time() -> None:
    with clocks(lambda seconds: -1.0) as read:
        assert time.monotonic() == -1.0
        assert elsewhere(lambda: time.monotonic()) > 0
        assert read == ["monotonic"]


def test_comparisons_of_other_threads_stay_as_they_are() -> None:
    with clocks(partial(watched, asked=lambda outcome: not outcome)):
        assert not time.time() > 0
        assert elsewhere(lambda: time.time() > 0) is True


def test_other_threads_draw_as_they_would() -> None:
    with extreme_draws(0.5):
        assert random.random() == np.random.rand() == 0.5
        draws = elsewhere(lambda: [random.random(), random.random(), *np.random.rand(2)])
    assert len(set(draws)) == 4


class Slow(nn.Module):
    """Lets another thread look at the clock while it is traced, and reads it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.put(elsewhere(lambda: type(time.monotonic())))
        time.monotonic()
        return self.linear(x).sum()


SEEN: SimpleQueue[type] = SimpleQueue()  # a list would be put back after the trace


def test_a_watch_thread_has_its_clock_through_a_whole_trace() -> None:
    before = time.monotonic
    trace(Slow(), (torch.ones(2, 2),))
    seen = [SEEN.get() for _ in range(SEEN.qsize())]
    assert len(seen) > 2 and set(seen) == {float}
    assert time.monotonic is before


def test_replacements_of_two_threads_end_in_any_order() -> None:
    """The first to begin ends first: each keeps its own, and the original comes back."""
    before, entered, left = time.time, Event(), Event()

    def other() -> float:
        with replaced_here(time, "time", lambda original: lambda: original() * 0 + 2.0):
            entered.set()
            assert left.wait(60)
            return time.time()

    found: list[float] = []
    thread = Thread(target=lambda: found.append(other()))
    with ExitStack() as stack:
        stack.enter_context(replaced_here(time, "time", lambda original: lambda: 1.0))
        thread.start()
        assert entered.wait(60)
        assert time.time() == 1.0
        with replaced_here(time, "time", lambda original: lambda: original() + 10):
            assert time.time() == 11.0
    assert time.time() > 1e9
    left.set()
    thread.join()
    assert found == [2.0] and time.time is before
