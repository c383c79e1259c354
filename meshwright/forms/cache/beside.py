"""What a rank does on a second thread, one piece after the other, while its first one trains."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.ir.torch_modes import is_watched

_threads: dict[int, ThreadPoolExecutor] = {}
"""By process: a thread is not there in a forked one."""


class Beside:
    """Pieces of work on what nobody else may touch before `join`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[Future[None]] = []

    def begin(self, work: Callable[[], None]) -> None:
        """Does some work after what was begun before. Where somebody watches operators of this
        thread, it is done here and now."""
        if is_watched():
            self.join()
            work()
            return
        thread = _threads.get(os.getpid())
        if thread is None:
            thread = _threads[os.getpid()] = ThreadPoolExecutor(1, "meshwright beside")
        self._begun.append(thread.submit(_within, _stream(self._device), work))

    def join(self) -> None:
        """All of it is done. What it raised is raised here, and again each time: it is half done,
        and nobody is to go on with what it has left."""
        while self._begun:
            self._begun[0].result()  # whoever is interrupted here still has to wait for it
            del self._begun[0]


def _stream(device: torch.device) -> AbstractContextManager[object]:
    """What makes another thread compute on the stream that this one computes on, in one order."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))


def _within(stream: AbstractContextManager[object], work: Callable[[], None]) -> None:
    with stream:
        work()
