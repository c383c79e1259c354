"""A batch that was sent ahead is the one that is cut next, if it still is that one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.codegen.lower.lower import lower
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.runtime.step.batch import BatchCutter
from meshwright.runtime.step.input_lane import InputLane, Parts
from meshwright.testing.nets import Net, data, plan_for

CPU = torch.device("cpu")


class Lane(InputLane):
    """Of a CPU: counts what it has brought."""

    def __init__(self) -> None:
        self.begun = self.arrivals = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.begun += 1
        yield

    def arrived(self, sent: Iterable[Tensor]) -> None:
        self.arrivals += len(list(sent))


def cutter_with(lane: InputLane | None) -> BatchCutter:
    plan: Plan = plan_for(Net, num_microbatches=2)
    graph = trace(Net(), data())
    return BatchCutter(graph, plan, lower(graph, plan, 0), 0, CPU, lane)


def same(a: Parts, b: Parts) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[at][name]) for at, part in a.items() for name, x in part.items()
    )


def test_what_was_sent_ahead_is_cut_once() -> None:
    lane = Lane()
    cutter, plain = cutter_with(lane), cutter_with(None)
    batch, other = data(1), data(2)
    cutter.send_ahead(batch, sharded=False)
    assert same(cutter.cut(other, sharded=False), plain.cut(other, sharded=False))
    assert not lane.arrivals, "another batch came in between"
    assert same(cutter.cut(batch, sharded=False), plain.cut(batch, sharded=False))
    assert lane.arrivals == 4, "two inputs of two micro-batches"
    cutter.cut(batch, sharded=False)
    assert lane.arrivals == 4 and lane.begun == 1


def test_a_batch_that_was_changed_is_sent_anew() -> None:
    lane = Lane()
    cutter, plain = cutter_with(lane), cutter_with(None)
    x, y = data(1)
    cutter.send_ahead((x, y), sharded=False)
    x.mul_(2)
    assert same(cutter.cut((x, y), sharded=False), plain.cut((x, y), sharded=False))
    assert not lane.arrivals
    cutter.send_ahead((x, y), sharded=True)  # a part of another batch
    cutter.cut((x, y), sharded=False)
    assert not lane.arrivals


def test_a_batch_that_no_step_can_take_is_left_to_that_step() -> None:
    lane = Lane()
    cutter = cutter_with(lane)
    cutter.send_ahead((torch.zeros(3, 1), torch.zeros(3, 1)), sharded=False)
    assert not lane.begun
    assert not cutter_with(None).sends_ahead and cutter.sends_ahead
