"""A large model on GPUs, where kernels beside collectives pay."""

from dataclasses import replace
from functools import cache

import torch

import meshwright as mw
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Fusion, Graph
from meshwright.ir.placed import joint_kernels
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.testing import tensor_forms as forms
from tests.model_axes import SEQUENCE, Part, plan_of

RANKS = forms.forms()[SEQUENCE].mesh["tp"]


@cache
def large(width: int = 1024, tokens: int = 4096) -> Graph:
    """Two layers that nobody has values of."""
    shape = (4, tokens, width)
    with torch.device("meta"):
        model = forms.MLP(width, 2, bias=True, flat=False)
        given = torch.empty(shape), torch.empty(shape)
    return mw.trace(model, given)


def cluster(nodes: int = 1, device: str = "a100-80") -> Cluster:
    return Cluster.preset(device, num_nodes=nodes, devices_per_node=RANKS // nodes)


def asked(graph: Graph, where: Cluster, precision: str = "bf16-autocast") -> tuple[Problem, Plan]:
    """The layers of sequence parallelism, with all kernels to be put in where they pay."""
    plan = plan_of(graph, (Part(SEQUENCE, len(graph.blocks), (4,)),))
    kernels = tuple(Fusion(name, 0, priced=True) for name in sorted(joint_kernels()))
    problem = make_problem(graph, where, precision=precision)
    return problem, replace(plan, kernels=kernels, precision=problem.precision)
