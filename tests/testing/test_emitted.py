"""Tensors of the host in emitted code are found."""

import copy

import pytest
import torch
from torch import fx

from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.program import StageProgram
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.fake_gpu.emitted import host_tensors
from meshwright.testing.models import CASES
from tests.traces import zoo_graph


def programs() -> tuple[StageProgram, ...]:
    """Of a Llama, whose prelude makes positions."""
    graph = zoo_graph(CASES["llama"])
    problem = make_problem(graph, Cluster.local(1), precision="fp64", optimizer="sgd")
    found = build_plan(problem, uniform_choice(problem), predict=False)
    return copy.deepcopy(lower(graph, found, 0))


def positions(given: tuple[StageProgram, ...]) -> fx.Node:
    """What makes them."""
    assert given[0].prelude is not None
    nodes = given[0].prelude.code.module.graph.nodes
    return next(x for x in nodes if str(x.target).startswith("aten.arange"))


def test_emitted_code_makes_nothing_on_the_host() -> None:
    assert not host_tensors(programs())


@pytest.mark.parametrize(
    ("device", "said"),
    [(None, "names no device and reads no tensor"), (torch.device("cpu"), "names cpu")],
)
def test_what_is_made_on_the_host_is_found(device: torch.device | None, said: str) -> None:
    given = programs()
    node = positions(given)
    node.kwargs = {} if device is None else {"device": device}
    (found,) = host_tensors(given)
    assert found == f"(prelude): {node.target} {said}"


def test_constants_of_the_host_are_found() -> None:
    given = programs()
    assert given[0].prelude is not None
    module, node = given[0].prelude.code.module, positions(given)
    module.register_buffer("told", torch.arange(16))
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr("told"))
    assert host_tensors(given) == ("(prelude): told is a constant of the host",)
