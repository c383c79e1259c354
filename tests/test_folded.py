"""Axes that are one with replicas for parameters that lie whole on them, against one process in
float64: a mixture's dense part over dp x cp x ep, its experts over dp x cp."""

from functools import cache
from typing import Any

import pytest

from meshwright.forms.folding import views_in
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from tests.codegen.quick import QUICK

EP2, EP4, CP2 = (("ep", 2),), (("ep", 4),), (("cp", 2),)
ON_FOUR: dict[str, tuple[ModelMesh, dict[str, Any]]] = {
    "zero0": (EP2, {"dp_replicate": 2, "zero": 0}),
    "zero1": (EP2, {"dp_shard": 2, "zero": 1}),
    "zero2": (EP2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    "zero3": (EP2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    "copies": (EP2, {"dp_replicate": 2, "zero": 3}),
    "ep alone": (EP4, {"zero": 2, "num_microbatches": 2}),
    "cp alone": (CP2, {"dp_replicate": 2, "zero": 3}),
    "cp and ep": ((*CP2, *EP2), {"zero": 3}),
    "ep and tp": ((*EP2, ("tp", 2)), {"zero": 1}),
    "stages": (EP2, {"pp": 2, "zero": 3, "num_microbatches": 2}),
}
ON_EIGHT: dict[str, tuple[ModelMesh, dict[str, Any]]] = {
    "cp, ep and copies": ((*CP2, *EP2), {"dp_replicate": 2, "zero": 3, "num_microbatches": 2}),
    "stages": ((*EP2, ("tp", 2)), {"pp": 2, "zero": 2, "num_microbatches": 2}),
}
EP3: dict[str, tuple[ModelMesh, dict[str, Any]]] = {"uneven": ((("ep", 3),), {"zero": 3})}


@cache
def traced() -> Graph:
    case = CASES["mixtral"]
    return trace(case.model(), case.example(8), case.loss_fn)


def _plan(world: int, mesh: ModelMesh, choice: dict[str, Any]) -> Plan:
    problem = make_problem(traced(), Cluster.local(world), precision="fp64", optimizer="adam")
    problem.solved[mesh, ""] = solve_layouts(traced(), mesh, usual(mesh, QUICK))
    chosen = uniform_choice(problem, model=mesh, **choice)
    return build_plan(problem, chosen, predict=False)


@pytest.mark.parametrize(("world", "plans"), [(4, ON_FOUR), (8, ON_EIGHT), (3, EP3)])
def test_training_is_that_of_one_process(
    world: int, plans: dict[str, tuple[ModelMesh, dict[str, Any]]]
) -> None:
    made = {name: _plan(world, mesh, choice) for name, (mesh, choice) in plans.items()}
    for plan in made.values():
        views = [view for i in range(len(plan.stages)) for view in views_in(plan, traced(), i)]
        assert any(view.dp > plan.stages[0].dp for view in views)
    found = check_each_equal(CASES["mixtral"], [(plan, traced()) for plan in made.values()])
    for name, difference in zip(made, found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{name}: {difference}"
