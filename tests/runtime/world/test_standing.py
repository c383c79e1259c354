"""Where a rank stands is told by a thread beside it, which must not change what the rank holds."""

import os
import threading
import weakref

import pytest
import torch

from meshwright.runtime.step.executor import RankProgress
from meshwright.runtime.world.standing import RankStanding, standing


def test_who_tells_where_a_rank_stands_holds_none_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, goes_on = threading.Event(), threading.Event()
    usual, told = os.path.realpath, list[RankStanding]()

    def slowly(path: str) -> str:
        looks.set()
        assert goes_on.wait(20)
        return usual(path)

    progress = RankProgress(phase="running")
    beside = threading.Thread(target=lambda: told.append(standing(progress)))

    def works() -> "weakref.ref[torch.UntypedStorage]":
        made = torch.ones(8)
        beside.start()
        assert looks.wait(20)
        return weakref.ref(made.untyped_storage())

    monkeypatch.setattr(os.path, "realpath", slowly)
    left = works()
    gone = left() is None
    goes_on.set()
    beside.join()
    assert gone
    assert "threading.py" in told[0].place and not told[0].waits
