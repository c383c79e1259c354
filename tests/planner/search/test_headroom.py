"""A tenth of each device's memory stays free, unless the user says otherwise."""

from dataclasses import replace
from functools import cache

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.text.units import size
from meshwright.planner.search.options import SearchOptions
from meshwright.planner.search.search import search
from tests.planner.problems import cluster, mlp


def roomy(room: int) -> Cluster:
    """Two devices with so many bytes for a job."""
    base = cluster(2)
    device = base.device_types[0]
    spent = replace(device, reserved_bytes=device.memory_bytes - room)
    return replace(base, device_types=(spent,))


@cache
def peak(room: int, layers: int = 2, **options: object) -> int:
    plan = search(mlp(layers), roomy(room), SearchOptions(progress=False, **options))
    assert plan.predicted
    return plan.predicted.peak_bytes


def test_plans_leave_a_share_free_and_less_when_asked() -> None:
    whole = ("model=1",)  # of replicas the fastest need much more than those that need least
    most = peak(10**9, 3, memory_headroom=0, constraints=whole)
    least = peak(10**9, 3, memory_headroom=0, objective="memory", constraints=whole)
    assert least < 0.9 * most
    assert peak(most, 3, memory_headroom=0, constraints=whole) == most  # filled to the last byte
    assert peak(most, 3, constraints=whole) <= 0.9 * most
    # What the user pins is what may be used.
    assert peak(most, 3, constraints=(*whole, f"memory<={most}B")) == most


def test_what_would_fit_without_it_is_said() -> None:
    least = peak(10**9, memory_headroom=0, objective="memory")
    with pytest.raises(Infeasible, match=r"10% of memory is kept free: memory_headroom=0.*needs"):
        peak(least)
    # Also where without a pin something fits.
    alone = ("dp_replicate=2", "recompute=none")
    needed = peak(10**9, memory_headroom=0, constraints=alone)
    assert peak(needed, memory_headroom=0, constraints=alone) == needed
    with pytest.raises(Infeasible, match=r"no plan meets.*; 10% of memory is kept free") as caught:
        peak(needed, constraints=alone)
    assert f"has a plan that needs {size(needed)}" in str(caught.value)
    with pytest.raises(Infeasible) as caught:
        peak(least // 2)
    assert "headroom" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "near"), [(-0.1, "0"), (1.0, "0.1")])
def test_a_share_is_less_than_all(wrong: float, near: str) -> None:
    with pytest.raises(PlanError, match=f"memory_headroom is {wrong}.*nearest is {near}$"):
        SearchOptions(memory_headroom=wrong)
