"""What public code of sums of sparse rows has wrong: marks of many ranks, rows of zeros, rows of an
earlier step, tables that are not emptied, sums divided twice. Ranks are threads here."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.running import Slot, SyncRun
from meshwright.forms.sync import running
from meshwright.ir.plan.plan import FormChoice, Setting

ROWS, WIDTH = 11, 3
Gradients = Sequence[Sequence[Tensor | None]]
"""Of each step, of each rank."""
RANK = threading.local()


class Threads:
    """Sums among threads, as a backend makes them: of bytes they overflow."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._given: list[Tensor] = [torch.zeros(0)] * ranks
        self._op: Any = dist.ReduceOp.SUM
        self._found = torch.zeros(0)
        self._met = threading.Barrier(ranks, self._fold, timeout=60)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> Any:
        self._given[RANK.number], self._op = x, op
        self._met.wait()
        found = self._found.clone()
        self._met.wait()  # all have read what is theirs
        x.copy_(found)
        return SimpleNamespace(wait=lambda: None)

    def _fold(self) -> None:
        every = torch.stack(self._given)
        if self._op == dist.ReduceOp.SUM:
            self._found = every.sum(0, dtype=every.dtype)
        elif self._op == dist.ReduceOp.MAX:
            self._found = every.amax(0)
        else:
            assert self._op == dist.ReduceOp.BOR
            self._found = every[0]
            for other in every[1:]:
                self._found = self._found | other


def summed(
    monkeypatch: pytest.MonkeyPatch, form: str, gradients: Gradients, backend: str = "gloo",
    **settings: Setting,
) -> list[Tensor]:  # fmt: skip
    """What a form makes of the gradients of each step, the same on all ranks."""
    threads = Threads(len(gradients[0]))
    monkeypatch.setattr(dist, "all_reduce", threads.all_reduce)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)

    def rank(number: int) -> list[Tensor]:
        RANK.number = number
        peers = SimpleNamespace(axis="dp", group=None, size=threads.ranks)
        notes = SimpleNamespace(mark=lambda: None, pending=lambda what, work, start: work)
        lines: Any = SimpleNamespace(
            stage=0, replicas=peers, recorder=notes, is_primary=lambda *_: True
        )
        param: Any = SimpleNamespace(requires_grad=True)
        whole = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
        stage: Any = SimpleNamespace(sync=FormChoice(form=form, settings=settings))
        store: Any = None
        run: SyncRun = running(form).build([Slot(param, whole, (0,))], lines, stage, store)
        found = []
        for step in gradients:
            run.begin()
            own = step[number]
            if own is not None:
                whole.grad = own.clone()
            run.after_backward(0, True)
            run.finish()
            assert whole.grad is not None
            found.append(whole.grad.clone())
        return found

    with ThreadPoolExecutor(threads.ranks) as ranks:
        first, *others = ranks.map(rank, range(threads.ranks))
    for other in others:
        assert all(x.equal(y) for x, y in zip(first, other, strict=True))
    return first


def rows(values: dict[int, float]) -> Tensor:
    """A gradient with these values in some rows."""
    found = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, value in values.items():
        found[row] = value * torch.arange(1, WIDTH + 1)
    return found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_marks_of_256_ranks_do_not_overflow(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A row that all have, one that two have, and one of a single rank."""
    every = [rows({0: 1.0, 9: n} if n in (3, 4) else {0: 1.0}) for n in range(256)]
    every[255][10] = 5.0
    (found,) = summed(monkeypatch, "packed_rows", [every], backend)
    assert found.equal(rows({0: 256.0, 9: 7.0}).index_fill(0, torch.tensor(10), 5.0))


@pytest.mark.parametrize(("form", "settings"), [("packed_rows", {}), ("sketch", {"cells": 1.0})])
def test_rows_of_zeros_and_of_earlier_steps(
    monkeypatch: pytest.MonkeyPatch, form: str, settings: dict[str, Setting]
) -> None:
    """One that occurs with zeros on one rank and not on the other; whose parts cancel; of a rank
    without a gradient; and of a step before. Sums are no means, in each step anew."""
    steps: Gradients = [
        [rows({1: 0.0, 2: 3.0, 4: 1.0}), rows({1: 2.0, 2: -3.0, 8: -1.0}), rows({4: 1.0})],
        [None, rows({7: 1.0}), rows({7: 2.0, 1: 1.0})],
        [rows({2: 1.0}), None, None],
        [None, None, None],
    ]
    wanted = [rows({1: 2.0, 4: 2.0, 8: -1.0}), rows({7: 3.0, 1: 1.0}), rows({2: 1.0}), rows({})]
    found = summed(monkeypatch, form, steps, **settings)
    for step, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12), step
        assert x[y.any(1).logical_not()].count_nonzero() == 0, "of other rows nothing is left"


def test_sketches_are_emptied_and_leave_other_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer cells than values, and without feedback: rows that a step has not stay zero, so
    that momentum after decoding is all that moves them; equal steps are estimated differently."""
    once, other = [rows({0: 1.0, 3: 2.0, 5: -1.0, 6: 4.0})] * 2, [rows({8: 1.0, 9: 1.0})] * 2
    found = summed(monkeypatch, "sketch", [once, other, once, once], cells=0.25, feedback="no")
    assert found[1][:8].count_nonzero() == 0 and found[1][8:10].count_nonzero() > 0
    assert not found[2].equal(found[0]) and not found[3].equal(found[2])
    for x in (found[0], found[2]):  # of a quarter of the cells an estimate keeps a quarter
        assert float(x.abs().max()) <= 0.25 * 2 * float(once[0].abs().sum())
