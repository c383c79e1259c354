"""Stages that send what has no gradient: nothing comes back, and nothing waits for it."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.comm.borders import border
from meshwright.costmodel.estimate import Estimate, estimate_all
from meshwright.costmodel.simulate.replay import replay
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.messages.messages import plan_messages

WIDTH, BATCH = 32, 8
SENT = BATCH // 2 * WIDTH * 4
"""Bytes of one of two micro-batches."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class _Blocks(nn.Module):
    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(4)])
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def planned(frozen: int) -> tuple[Problem, Plan, Estimate]:
    """Of four blocks the first `frozen` do not train; two stages."""
    graph = trace(_Blocks(frozen), (torch.randn(BATCH, WIDTH),))
    problem = make_problem(graph, Cluster.local(2), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, pp=2, num_microbatches=2))
    return problem, plan, estimate_all(graph, problem.cluster, plan, problem.tables)


def test_a_border_has_bytes_and_seconds_of_each_direction() -> None:
    for frozen, back in ((0, SENT), (2, 0)):
        problem, plan, found = planned(frozen)
        seconds, nbytes = border(problem.tables, plan, 0)
        assert nbytes == SENT and seconds > 0
        assert border(problem.tables, plan, 0, back=True) == ((seconds, back) if back else (0, 0))
        first, second = found.costs
        assert (first.border_back_bytes, second.entry_back_bytes) == (back, back)
        assert (first.border_bytes, second.entry_bytes) == (SENT, SENT)


@pytest.mark.parametrize("frozen", [0, 2])
def test_the_timeline_has_the_messages_that_ranks_send(frozen: int) -> None:
    problem, plan, found = planned(frozen)
    programs = lower(problem.graph, plan, 0)
    ran = plan_messages(plan, plan.schedule.parse(), programs, 0)
    table = found.stepped.timeline.table
    told = [item for item in table.items if item.source >= 0]
    assert len(told) == len(ran) == (2 if frozen else 4)
    back = [item for item in told if item.rank == 0]
    assert len(back) == sum([message.gradient for message in ran])


def test_the_plan_alone_tells_that_nothing_comes_back() -> None:
    problem, plan, found = planned(2)
    kept = plan_io.loads(plan_io.dumps(in_detail(problem, plan)))
    again = replay(kept).timeline
    ends = found.stepped.timeline.row_end_s
    assert again.row_end_s == pytest.approx(ends, rel=1e-3)
    assert again.row_end_s[0] < again.row_end_s[1]
    detail = kept.predicted.detail  # type: ignore[union-attr]
    sent = [[t.nbytes for t in detail.stage(i).traffic if t.purpose == "stages"] for i in (0, 1)]
    assert sent == [[2 * SENT], []]


def test_messages_of_one_size_are_not_said_twice() -> None:
    problem, plan, _ = planned(0)
    text = plan_io.dumps(in_detail(problem, plan))
    assert "back_bytes" not in text and "back_s" not in text
    assert '"border_back_bytes": 0' in plan_io.dumps(in_detail(*planned(2)[:2]))
