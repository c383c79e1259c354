"""Where experts lie is said of each kind of layer, by its layout alone."""

from dataclasses import replace

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import ModelMesh, Plan
from meshwright.ir.plan.show import printed
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.models import CASES
from meshwright.testing.split_all import SPLIT_ALL
from meshwright.tools.explain.experts import where_experts_lie
from meshwright.tools.explain.show import Explanation, as_data, render
from tests.tools.report.plans import piped
from tests.traces import zoo_graph


def _plan(world: int, mesh: ModelMesh, **choice: int) -> Plan:
    graph = zoo_graph(CASES["mixtral"], 8)
    problem = make_problem(graph, Cluster.local(world), precision="fp64", optimizer="adam")
    problem.solved[mesh, ""] = solve_layouts(graph, mesh, usual(mesh, SPLIT_ALL))
    return build_plan(problem, uniform_choice(problem, model=mesh, **choice))


@pytest.mark.parametrize(
    ("world", "mesh", "choice", "said"),
    [
        (
            8, (("cp", 2),), {"pp": 2, "dp_shard": 2, "num_microbatches": 4},
            "(stages 0-1): other experts on each rank of cp 2; tokens travel to them on cp; "
            "2 copies, the first on ranks 0-1",
        ),
        (
            4, (("cp", 2), ("tp", 2)), {},
            "(stage 0): other experts on each rank of cp 2, a part of each on every rank of tp 2; "
            "tokens travel to them on cp; one copy, on ranks 0-3",
        ),
        (2, (), {"dp_shard": 2}, "(stage 0): all on every rank; 2 copies, the first on rank 0"),
    ],
)  # fmt: skip
def test_axes_copies_and_travel(
    world: int, mesh: ModelMesh, choice: dict[str, int], said: str
) -> None:
    plan = _plan(world, mesh, **choice)
    (found,) = where_experts_lie(plan)
    assert found.text == f"model.layers.* {said}"
    explained = Explanation.of(plan)
    shown = " ".join(printed(render(explained)).split())
    assert f"Where experts lie - {found.text}" in shown
    assert as_data(explained, [])["experts"][0]["copies"] == found.copies


def test_what_is_gathered_for_each_use_is_said() -> None:
    plan = _plan(2, (("cp", 2),))
    whole = " ".join([*["S(0,outer=8)"] * 3, "R|P R|P -> S(0,outer=8)"])
    layouts = tuple(
        replace(each, ops={
            key: {**axes, "cp": whole} if key.endswith("/experts") else axes
            for key, axes in each.ops.items()
        }) for each in plan.layouts
    )  # fmt: skip
    (found,) = where_experts_lie(replace(plan, layouts=layouts))
    assert found.text.endswith(
        "a part kept on each rank of cp 2, gathered for each use; one copy, on ranks 0-1"
    )
    assert not found.travel


def test_nothing_is_said_of_a_model_without_experts() -> None:
    plan = piped(4, 2, 8, 6)
    assert where_experts_lie(plan) == () == Explanation.of(plan).experts
