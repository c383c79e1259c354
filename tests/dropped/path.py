"""The whole path of a file that a folder of the user's own has, in a process of its own:

python -m tests.dropped.path (kernel | family) NAME
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.costmodel.ops.compute import op_time
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Op
from meshwright.ir.ops import facts
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import whole_op
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_equal

WIDTH, BATCH = 16, 8


class Model(nn.Module):
    """Two layers of a product, the operator in question, and a product back."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(self.activation(up(x)))
        return x.square().sum()

    def activation(self, x: Tensor) -> Tensor:
        if not self.namespace:
            return torch.relu(x).pow(2)
        made: Tensor = getattr(torch.ops, self.namespace).stretch(x, x.shape[-1])
        return made


@dataclass(frozen=True)
class Case:
    """What `check_equal` trains."""

    namespace: str
    loss_fn: Any = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self.namespace).double()

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),)


def main(kind: str, name: str) -> None:
    """Print as JSON what came of it."""
    operator = f"meshwright.{name}" if kind == "kernel" else f"{name}.stretch"
    assert facts(f"{operator}.default")
    case = Case("" if kind == "kernel" else name)
    generator = torch.Generator().manual_seed(0)
    kernels = (name,) if kind == "kernel" else ()
    graph = trace(case.model(), case.batch(BATCH, generator), kernels=kernels)
    pins = (
        "tp=2", "pp=1", "dp=1", "recompute=none", "saved=none", "num_microbatches=1",
        "place up.*.weight tp=S(0)",
    )  # fmt: skip
    problem = make_problem(graph, Cluster.local(2), precision="fp64", constraints=pins)
    plan = search_problem(problem, "ilp", progress=False)
    ours = [op for op in graph.ops if op.target.startswith(operator)]
    found = check_equal(case, plan, graph, steps=3)
    print(
        json.dumps({
            "ops": len(ours),
            "class": classify(ours[0].target).value,
            "flops": ours[0].flops,
            "seconds": _seconds(ours[0], graph.tensors, problem.cluster),
            "step_s": plan.predicted.step_s if plan.predicted else 0.0,
            "strategies": sorted({
                layout.ops.get(op.key, {}).get("tp", "")
                for layout in plan.layouts for op in ours if op.key in layout.ops
            }),
            "places": {fusion.kernel: fusion.places for fusion in plan.kernels},
            "difference": found.worst_of_both,
        })
    )  # fmt: skip


def _seconds(op: Op, tensors: Any, cluster: Cluster) -> float:
    return op_time(whole_op(op, tensors, cluster.device(0)), cluster.device(0)).total_s


if __name__ == "__main__":
    main(*sys.argv[1:])
