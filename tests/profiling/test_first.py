"""What to measure first, by what each measurement takes from the bands of the best plans."""

from itertools import pairwise

import pytest
import torch

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.narrowing import LINKS, narrowings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.first import measure_first
from meshwright.testing.models import CASES
from tests.traces import zoo_graph


def test_measurements_come_in_order_and_end_where_all_is_known() -> None:
    case = CASES["gpt2"]
    graph = zoo_graph(case, 8, torch.float32)
    problem = make_problem(graph, Cluster.local(4), precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=4))
    found = narrowings([estimate_all(graph, problem.cluster, plan, problem.tables)])
    assert found[0].measured in {block.pattern for block in graph.blocks}
    assert LINKS in {one.measured for one in found}
    gains = [one.before - one.after for one in found]
    assert min(gains) > 0.0 and gains[0] == max(gains)
    assert all(then.before == one.after for one, then in pairwise(found))
    assert plan.predicted
    assert found[0].before == pytest.approx(plan.predicted.error_band)
    assert found[-1].after < 0.5 * found[0].before
    # Without gradients to send, links are known by what goes inside of blocks.
    problem = make_problem(graph, Cluster.local(2), precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, tp=2))
    (one,) = [
        one for one in narrowings([estimate_all(graph, problem.cluster, plan, problem.tables)])
        if one.measured == LINKS
    ]  # fmt: skip
    assert one.before - one.after > 0.02
    pins = ("pp=1", "dp_replicate=4")
    assert measure_first(graph, Cluster.local(4), precision="fp32", constraints=pins)
