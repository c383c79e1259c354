"""Any plan in one line, legal; sizes that cannot be are refused with the nearest that can."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.verify import verify
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, even_cuts, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES
from meshwright.planner.problem.space import microbatch_counts
from meshwright.planner.search.notes import notes_of
from tests.planner.problems import cluster, mlp, problem, traced

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp4": {"dp_replicate": 4},
    "zero1": {"dp_shard": 4, "zero": 1},
    "zero2": {"dp_shard": 4, "zero": 2},
    "zero3": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4, "num_microbatches": 4},
    "tp2 pp2": {"pp": 2, "tp": 2, "num_microbatches": 2},
    "dp2 tp2 pp2": {"pp": 2, "tp": 2, "dp_replicate": 2, "num_microbatches": 2},
    "uneven stages": {"pp": 2, "cuts": (1,), "num_microbatches": 2},
    "uneven replicas": {"pp": 2, "stage_dp": (3, 1), "num_microbatches": 2},
    "different tp": {"pp": 2, "stage_dp": (2, 1), "stage_tp": (1, 2), "num_microbatches": 4},
    "recompute": {"pp": 2, "recompute": "full", "num_microbatches": 2},
    **{f"schedule {name}": {"pp": 2, "num_microbatches": 4, "schedule": name}
       for name in SCHEDULES},
}  # fmt: skip


@pytest.mark.parametrize("model", ["mlp", "sequential", "gpt2"])
@pytest.mark.parametrize("name", PLANS)
def test_uniform_choices_are_legal_plans(model: str, name: str) -> None:
    graph = mlp(4) if model == "mlp" else traced(model)
    asked = problem(graph, cluster(8))
    plan = build_plan(asked, uniform_choice(asked, **PLANS[name]))
    assert verify(plan, graph, asked.cluster) == ()
    assert plan.predicted and plan.predicted.step_s > 0
    notes = notes_of(asked, plan)
    known = ("whole on each rank", "not used", "run together in pairs", "are in float64")
    assert all(any(words in note for words in known) for note in notes)


def test_uneven_replicas_share_the_batch() -> None:
    asked = problem(mlp(), cluster(4))
    plan = build_plan(asked, uniform_choice(asked, **PLANS["uneven replicas"]), predict=False)
    assert [stage.batch_shares for stage in plan.stages] == [(2, 1, 1), (4,)]
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2), (3,)]
    assert plan.predicted is None


def test_one_layer_and_four_stages() -> None:
    asked = problem(mlp(1), cluster(4))
    with pytest.raises(PlanError, match=r"4 stages for 1 blocks.*nearest is 1"):
        uniform_choice(asked, pp=4)


def test_microbatches_must_divide_the_batch() -> None:
    asked = problem(mlp(), cluster(1))
    with pytest.raises(PlanError, match=r"batch 8 does not split into 3 .* nearest is 2"):
        build_plan(asked, uniform_choice(asked, num_microbatches=3))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 12))
def test_cuts_are_the_first_of_the_nearest(work: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(work))
    ends, found = list(accumulate(work)), [0]
    for stage in range(1, num_stages):
        goal = ends[-1] * stage / num_stages
        free = range(found[-1] + 1, len(work) - num_stages + stage + 1)
        found.append(min(free, key=lambda i: abs(ends[i - 1] - goal)))
    assert even_cuts(work, num_stages) == tuple(found[1:])


def test_even_cuts() -> None:
    assert even_cuts((1, 1, 1, 1), 2) == (2,)
    assert even_cuts((9, 1, 1, 1), 3) == (1, 2)
    assert even_cuts((1, 1, 1, 9), 4) == (1, 2, 3)


def test_batch_norms_are_noted() -> None:
    asked = problem(traced("resnet50"), cluster(2))
    plan = build_plan(asked, uniform_choice(asked, dp_replicate=2, num_microbatches=2))
    notes = notes_of(asked, plan)
    assert "micro-batches change the result" in notes[0]
    assert "synchronised over dp" in notes[1]


class _Distances(nn.Module):
    """Each sample's from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.second(self.first(x).tanh())
        return torch.cdist(made.sin(), made).mean()


def test_microbatches_of_samples_that_need_each_other_are_refused() -> None:
    """No job could run them."""
    graph = trace(_Distances(), (torch.randn(8, 8),))
    pins = ("num_microbatches in 2,4",)
    for allow in ((), ("delayed",)):
        asked = make_problem(graph, cluster(2), constraints=pins, allow=allow)
        with pytest.raises(PlanError, match=r"pinned to 2, 4, and .* nearest is 1: .* whole batch"):
            microbatch_counts(asked)


def test_notes_tell_of_the_layouts_that_a_plan_has() -> None:
    """Not of the usual ones of its mesh."""
    asked = problem(traced("gpt2"), cluster(2))
    plan = build_plan(asked, uniform_choice(asked, tp=2))
    whole = replace(plan, layouts=tuple([replace(x, ops={}) for x in plan.layouts]))
    counts = [sum("computed whole" in n for n in notes_of(asked, p)) for p in (plan, whole)]
    assert counts == [0, len(list(asked.graph.distinct_blocks()))]
