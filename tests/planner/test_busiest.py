"""Bounds of pipelines whose blocks cannot be shared out evenly: none of them is divided."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.search.search import search_problem
from tests.planner.problems import cluster, mlp, problem

COUNT = 4


def relaxation(layers: int, ranks: int) -> Relaxation:
    pins = (f"pp={ranks}", f"num_microbatches={COUNT}")
    asked = problem(mlp(layers), cluster(ranks), constraints=pins)
    return Relaxation(RunCosts(asked), [Places(asked, order) for order in orders(asked)])


def test_some_rank_has_a_kind_s_share_rounded_up() -> None:
    found = relaxation(6, 2)
    assert found.rates.counts.max() == 5
    kinds = len(found.rates.counts)
    # Of two meshes, two modes: each kind is taken where it is fastest.
    busy = np.array([[[4.0] * kinds, [6.0] * kinds], [[3.0] * kinds, [5.0] * kinds]])
    rates: Any = SimpleNamespace(busy_s=busy, once_s=np.full_like(busy, 8.0))
    whole_s, busy_s = found._busiest_s(Frame(2, COUNT), rates)
    assert whole_s == pytest.approx(COUNT * 3 * (3.0 + 8.0 / COUNT))
    assert busy_s == pytest.approx(COUNT * 3 * 3.0)  # without what goes on once per step
    assert found._busiest_s(Frame(1, COUNT), rates)[0] == pytest.approx(
        COUNT * 5 * (3.0 + 8.0 / COUNT)
    )


def test_no_plan_beats_the_bound() -> None:
    found = relaxation(6, 4)
    bound, plan = found.bound(Frame(4, COUNT)), search_problem(found.problem)
    assert plan.predicted and 0 < bound.seconds <= plan.predicted.step_s
