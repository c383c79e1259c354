"""What is done on a second thread: whoever waits knows that it is done, or why it is not."""

import threading
from typing import Any

import pytest
import torch

from meshwright.forms.cache.beside import Beside

CPU = torch.device("cpu")


def _fail() -> None:
    raise ValueError("half done")


def test_what_has_failed_is_told_to_all_who_wait() -> None:
    """Nobody goes on with what it left."""
    beside = Beside(CPU)
    beside.begin(_fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="half done"):
            beside.join()
    other = Beside(CPU)  # which has nothing to do with it
    done: list[int] = []
    for number in range(4):
        other.begin(lambda number=number: done.append(number))  # type: ignore[misc]
    other.join()
    assert done == [0, 1, 2, 3]


def test_who_is_interrupted_while_waiting_still_has_to_wait(monkeypatch: Any) -> None:
    beside, may_end, done = Beside(CPU), threading.Event(), []

    def work() -> None:
        may_end.wait()
        done.append(threading.current_thread())

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    beside.begin(work)
    with monkeypatch.context() as changed:
        changed.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            beside.join()
    may_end.set()
    beside.join()
    assert done and done[0] is not threading.current_thread()


def test_where_operators_are_watched_all_is_done_here() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    beside, done = Beside(CPU), []
    with Watching():
        beside.begin(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]
