"""Small nets, plans for them, and plain training, for tests of what training is."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

BATCH, WIDTH = 8, 8


class Net(nn.Module):
    """Four layers, some of whose parameters the loss does not reach."""

    def __init__(self, *, drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(drop)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.detached = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("idle", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return ((self.head(x) + self.detached(x).detach() - y) ** 2).mean()


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(BATCH, WIDTH, generator=generator).double() for _ in range(2)]
    return made[0], made[1]


_traced: dict[str, Graph] = {}


def graph_of(plan: Plan) -> Graph:
    """The graph that `plan_for` made a plan for in this process, or before it was forked: tracing
    takes longer than the steps of such a job, on every rank."""
    return _traced[plan.model.fingerprint]


def plan_for(
    make: Callable[[], nn.Module], world: int = 1, *, inputs: Any = None, precision: str = "fp64",
    **choice: Any,
) -> Plan:  # fmt: skip
    """A plan in float64, or for other inputs in another precision."""
    graph = trace(make(), data() if inputs is None else inputs)
    _traced[graph.fingerprint] = graph
    problem = make_problem(graph, Cluster.local(world), precision=precision, optimizer="adamw")
    return build_plan(problem, uniform_choice(problem, **choice), predict=False)


CHOICES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2}, "pp": {"pp": 2, "num_microbatches": 2}, "zero0": {"dp_shard": 2, "zero": 0},
    "zero1": {"dp_shard": 2, "zero": 1}, "zero2": {"dp_shard": 2, "zero": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
}  # fmt: skip


@cache
def net_plan(name: str = "", norm: bool = False) -> Plan:
    """For `Net`, on two ranks, or on one."""
    return plan_for(lambda: Net(norm=norm), 2 if name else 1, **CHOICES.get(name, {}))
