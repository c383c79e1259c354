"""Plans with work beside collectives."""

from dataclasses import replace
from typing import Any

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.plan.verify import check
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.testing.models import CASES
from meshwright.testing.split_all import split_all
from tests.planner.problems import cluster, problem
from tests.traces import zoo_graph


def planned(
    model: str, batch: int, overlap: str, *, graph: Graph | None = None, **choice: Any
) -> tuple[Graph, Plan]:  # fmt: skip
    """Everything that can be split is split, however small. `graph`: in place of the model's with
    its own operators."""
    graph = graph or zoo_graph(CASES[model], batch)
    world = choice.get("tp", 1) * choice.get("pp", 1) * choice.get("dp_shard", 1)
    problem = make_problem(graph, Cluster.local(world), precision="fp64", optimizer="adam")
    tp = choice["tp"]
    problem.solved[model_mesh({"tp": tp}), ""] = split_all(graph, tp)
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    stages = tuple(replace(stage, overlap=overlap) for stage in plan.stages)  # type: ignore[arg-type]
    plan = replace(plan, stages=stages)
    check(plan, graph, problem.cluster)
    return graph, plan


def priced(*pins: str, devices: int = 4) -> Problem:
    """A GPT-2 on devices whose links are slow."""
    graph = planned("gpt2", 8, "none", tp=2)[0]
    return problem(graph, machine(devices), constraints=("pp=1", *pins))


def machine(devices: int) -> Cluster:
    found = cluster(devices, slow=True)
    return replace(found, device_types=(replace(found.device_types[0], kind="cuda"),))
