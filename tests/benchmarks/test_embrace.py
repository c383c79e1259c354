"""A slice of `benchmarks.embrace`: small models, few steps, the same code."""

import torch

from benchmarks.embrace import main, models
from benchmarks.embrace.agreement import disagreement
from benchmarks.embrace.contenders import DDP, OURS, PLAIN, REPLICAS, SPARSE
from meshwright.ir.cluster.cluster import Cluster


def test_plans_are_chosen_by_rows_and_all_agree() -> None:
    """Forms of tables are what a search chooses, also where it may choose anything: before they are
    in them, replicas are far behind plans that split tables."""
    case = models.recommender(width=8, samples=2048, rows=20_000, dtype=torch.float64)
    cluster = main.wired(Cluster.local(2), 1e8)
    planned = main.plans(case, cluster, limit_s=10)
    assert len(planned[OURS].stages[0].by_parameter) == 4
    assert len(planned[REPLICAS].stages[0].by_parameter) == 4
    assert not planned[PLAIN].stages[0].by_parameter
    steps = {name: plan.predicted.step_s for name, plan in planned.items() if plan.predicted}
    assert steps[OURS] <= steps[REPLICAS] < 0.3 * steps[PLAIN]
    apart = disagreement(case, planned, 2)
    assert set(apart) == {OURS, REPLICAS, DDP, SPARSE}
    assert max(apart.values()) < 1e-12, apart
