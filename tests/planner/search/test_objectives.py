"""Objectives: cheapest cluster, largest batch; rankings of clusters, and why some have no plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.planner.search.largest_batch import largest_batch
from meshwright.planner.search.objectives import cost_per_step, price_per_hour, rating
from meshwright.planner.search.ranking import figures
from meshwright.planner.search.search import rank, search
from tests.planner.problems import cluster, mlp


def priced(num_devices: int, price: float | None, *, memory_bytes: int = 10**9) -> Cluster:
    base = cluster(num_devices)
    device = replace(base.device_types[0], price_per_hour=price, memory_bytes=memory_bytes)
    return replace(base, name=f"{num_devices} at {price}", device_types=(device,))


QUICK = {"precision": "fp32", "progress": False, "constraints": ("recompute=none",)}


def plan_on(machine: Cluster, **asked: object) -> Plan:
    return search(mlp(), machine, **{**QUICK, **asked})  # type: ignore[arg-type]


def test_prices_are_of_whole_nodes_that_work() -> None:
    one = priced(2, 3.0)
    two = replace(one, nodes=one.nodes * 2)
    plan = plan_on(one)
    assert two.prices_per_hour == (6.0, 6.0) and price_per_hour(two, plan) == 6.0
    assert plan.predicted
    assert cost_per_step(one, plan) == pytest.approx(6.0 * plan.predicted.step_s / 3600)
    assert rating("throughput", one, plan)[0] == plan.predicted.step_s
    assert rating("memory", one, plan)[0] == plan.predicted.peak_bytes


def test_a_price_changes_no_fingerprint_and_is_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    free = replace(priced(2, None), name=priced(2, 3.0).name)
    assert priced(2, 3.0).fingerprint == free.fingerprint
    priced(2, 3.0).save(tmp_path / "cluster.yaml")
    assert "price_per_hour: 3.0" in (tmp_path / "cluster.yaml").read_text()
    assert Cluster.load(tmp_path / "cluster.yaml").prices_per_hour == (6.0,)
    assert Cluster.preset("h100-sxm").prices_per_hour is None
    with pytest.raises(PlanError, match="price_per_hour is -1"):
        priced(2, -1.0)


def test_cheapest_needs_prices() -> None:
    with pytest.raises(PlanError, match="has no price for toy; set price_per_hour"):
        plan_on(cluster(2), objective="cheapest")
    with pytest.raises(PlanError, match="nearest is 'cheapest'"):
        plan_on(cluster(2), objective="cheap")


def test_the_cheapest_cluster_within_a_time() -> None:
    # Without pipelines, as under a limit all plans are gone through.
    quick: dict[str, Any] = QUICK | {"constraints": ("recompute=none", "pp=1")}
    slow, fast = priced(1, 1.0), priced(4, 2.0)
    by_speed = rank(mlp(), [slow, fast], **quick)
    assert by_speed.entries[0].cluster is fast
    took = {entry.cluster.name: entry.plan.predicted.step_s for entry in by_speed.entries}  # type: ignore[union-attr]
    assert took[fast.name] < took[slow.name] < 8 * took[fast.name]
    free = rank(mlp(), [fast, slow], objective="cheapest", **quick)
    assert [entry.cluster.name for entry in free.entries] == [slow.name, fast.name]
    limit = f"step<={(took[fast.name] + took[slow.name]) / 2}s"
    asked = quick | {"constraints": (*quick["constraints"], limit), "objective": "cheapest"}
    ranking = rank(mlp(), [slow, fast], **asked)
    assert ranking.best.cluster.name == fast.name
    assert ranking.entries[1].plan is None and "step<=" in ranking.entries[1].why
    assert f"nearest cap: step<={took[slow.name]!r}s" in ranking.entries[1].why
    assert search(mlp(), [slow, fast], **asked) == ranking.best


def test_a_ranking_is_a_table_with_reasons() -> None:
    tight = priced(2, None)
    small = replace(tight.device_types[0], reserved_bytes=10**9 - 10_000)
    tight = replace(tight, name="tight", device_types=(small,))
    ranking = rank(mlp(), [tight, priced(2, 1.5)], **QUICK)  # type: ignore[arg-type]
    assert [entry.plan is None for entry in ranking.entries] == [False, True]
    text = str(ranking)
    assert "2 at 1.5" in text and "3.00" in text and "does not fit" in text
    row = figures(ranking.entries[0])
    assert row["price_per_hour"] == 3.0
    assert row["cost_per_million_samples"] == pytest.approx(1e6 * 3.0 * row["step_s"] / 3600 / 8)
    with pytest.raises(Infeasible, match="tight: the model does not fit"):
        rank(mlp(), [tight, tight], **QUICK).best  # type: ignore[arg-type]  # noqa: B018
    with pytest.raises(PlanError, match="give at least one"):
        rank(mlp(), [], **QUICK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fits,start,unit,found",
    [(37, 8, 1, 37), (37, 64, 1, 37), (37, 8, 4, 36), (1, 8, 1, 1), (4, 4, 4, 4), (5, 1, 1, 5)],
)
def test_doubling_and_bisection(fits: int, start: int, unit: int, found: int) -> None:
    base, asked = plan_on(cluster(1)), []

    def plan_at(batch: int) -> Plan | None:
        asked.append(batch)
        return replace(base, global_batch_size=batch) if batch <= fits else None

    best = largest_batch(plan_at, start, unit, lambda: True)
    assert best is not None and best.global_batch_size == found
    assert best.notes[-1] == f"largest batch: {found + unit} does not fit"
    assert len(asked) == len(set(asked)) <= 14 and all(batch % unit == 0 for batch in asked)


def test_no_batch_fits_and_time_that_is_up() -> None:
    assert largest_batch(lambda batch: None, 8, 1, lambda: True) is None
    base = plan_on(cluster(1))
    times = iter([True, True, True, False, False])
    found = largest_batch(
        lambda batch: replace(base, global_batch_size=batch) if batch < 37 else None,
        8, 1, lambda: next(times),
    )  # fmt: skip
    assert found is not None and found.global_batch_size == 32
    assert "64 does not fit, those between were not tried" in found.notes[-1]


def test_the_largest_batch_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    machine = cluster(2)
    device = replace(machine.device_types[0], reserved_bytes=10**9 - 90_000)
    machine = replace(machine, device_types=(device,))
    asked = {
        "example_inputs": (torch.zeros(4, 16), torch.zeros(4, 16)), "loss_fn": loss,
        "precision": "fp32", "progress": False, "objective": "batch",
    }  # fmt: skip
    pins = ("num_microbatches=1", "recompute=none", "pp=1", "tp=1")
    plan = search(model, machine, constraints=pins, **asked)  # type: ignore[arg-type]
    assert plan.objective == "batch" and plan.global_batch_size > 8
    more = plan.global_batch_size + 1
    assert plan.notes[-1] == f"largest batch: {more} does not fit"
    with pytest.raises(Infeasible):
        search(model, machine, constraints=pins, global_batch_size=more,
               **(asked | {"objective": "throughput"}))  # type: ignore[arg-type]  # fmt: skip
    with pytest.raises(PlanError, match="limit num_microbatches"):
        search(model, machine, **asked)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="give the module"):
        search(mlp(), machine, objective="batch", progress=False)


def test_the_public_names() -> None:
    assert mw.rank is rank and mw.search is search
