"""No plan is faster than the bound, however a stack's replicas agree."""

from itertools import product

import pytest

from meshwright.costmodel.as_run import changes_exchanges
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.styles import STYLES, style
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from tests.styles.small_llama import small_llama

SHARDS = [(4, 0), (1, 1), (2, 1), (2, 3), (1, 3)]
"""Replicas of shards, and what is sharded, on four devices."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", [n for n in STYLES if changes_exchanges(style(n))])
def test_no_plan_beats_the_bound(name: str) -> None:
    cluster = Cluster.preset("h100-sxm", num_nodes=2, devices_per_node=2, network="ethernet-25g")
    for (replicas, level), batches in product(SHARDS, (1, 4)):
        pins = (
            f"dp_replicate={replicas}", f"zero={level}", "pp=1", "tp=1", "cp=1",
            f"num_microbatches={batches}", "recompute=none", "saved=none",
        )  # fmt: skip
        asked = make_problem(small_llama(), cluster, constraints=pins, precision="bf16", style=name)
        plan = build_plan(asked, uniform_choice(
            asked, dp_replicate=replicas, dp_shard=4 // replicas, zero=level,
            num_microbatches=batches,
        ))  # fmt: skip
        assert plan.predicted
        assert 0.0 < lower_bound(asked) <= plan.predicted.step_s, pins
