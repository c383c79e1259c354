"""What the runtime itself takes of a step is in every bound once, as it is in every step."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.costmodel.ops import overheads
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.bounds.bound import lower_bound, relaxed
from meshwright.planner.bounds.frames import frames
from meshwright.planner.bounds.leaf_bound import LeafBound
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem
from tests.planner.gpus import on_gpus
from tests.planner.mixed import mixed
from tests.planner.problems import cluster, mlp, problem

LONGER_S = 0.25


def _of_both_kinds() -> Cluster:
    """A fast device of a kind whose steps take longer by themselves, first of all."""
    base = mixed()
    fast, slow = base.device_types
    return replace(base, device_types=(replace(fast, kind="cuda"), slow))


def _sharing_cores() -> Cluster:
    base = cluster(4)
    return replace(base, nodes=(replace(base.nodes[0], cores=2),))


PROBLEMS: dict[str, tuple[Callable[[], Problem], float]] = {
    "cpu": (lambda: problem(mlp(4), cluster(4)), 1.0),
    "shared cores": (lambda: problem(mlp(4), _sharing_cores()), 2.0),
    "three devices": (lambda: problem(mlp(4), cluster(3)), 1.0),
    "gpu": (lambda: on_gpus("two devices"), 1.0),
    "mixed": (lambda: problem(mlp(4), mixed()), 1.0),
}
CHOICES: tuple[dict[str, int], ...] = (
    {}, {"pp": 2, "num_microbatches": 2}, {"num_microbatches": 2}
)  # fmt: skip


def _figures(asked: Problem) -> tuple[list[float], list[float]]:
    """Bounds, and steps of some plans."""
    devices, runs = asked.cluster.num_devices, relaxed(asked).rates.runs
    least_s = max(lower_bound(asked), lower_bound(asked, late=True))
    bounds: list[float] = []
    steps: list[float] = []
    for frame in frames(asked):
        bound = relaxed(asked).bound(frame)
        bounds += [bound.seconds, relaxed(asked).floor_s(frame, "dear")]
        bounds.append(relaxed(asked).quick_s(frame))
        assert bounds[-1] <= bound.seconds * (1 + 1e-9)
    for said in CHOICES:
        ranks = said.get("pp", 1)
        if devices % ranks:
            continue
        choice = uniform_choice(asked, dp_replicate=devices // ranks, **said)
        plan = build_plan(asked, choice)
        assert plan.predicted
        bounds.append(LeafBound(runs).seconds(choice))
        steps.append(plan.predicted.step_s)
        assert bounds[-1] <= steps[-1] * (1 + 1e-5), said
        assert least_s <= steps[-1] * (1 + 1e-5), said
    return bounds, steps


@pytest.mark.parametrize("name", PROBLEMS)
def test_bounds_rise_as_steps_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, slower = PROBLEMS[name]
    bounds, steps = _figures(make())
    for constant in ("CPU_STEP_S", "GPU_STEP_S"):
        monkeypatch.setattr(overheads, constant, getattr(overheads, constant) + LONGER_S)
    later, longer = _figures(make())
    for before, after in zip(steps, longer, strict=True):
        assert after - before == pytest.approx(LONGER_S * slower, rel=1e-5)
    for before, after in zip(bounds, later, strict=True):
        known = before > 0.0  # some are not known
        assert after - before == pytest.approx(known * LONGER_S * slower, rel=1e-9)


def test_devices_of_both_kinds_have_the_lesser_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _of_both_kinds()
    bounds, _ = _figures(problem(mlp(4), machine))
    for constant, rise in (("CPU_STEP_S", 0.0), ("GPU_STEP_S", LONGER_S)):
        monkeypatch.setattr(overheads, constant, getattr(overheads, constant) + LONGER_S)
        later, _ = _figures(problem(mlp(4), machine))
        for before, after in zip(bounds, later, strict=True):
            assert after - before == pytest.approx((before > 0) * rise, rel=1e-9, abs=1e-12)
