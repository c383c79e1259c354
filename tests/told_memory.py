"""Memory of a plan for processes on a CPU, beside what their tensors hold.

A model is traced once: its ranks are forks, which have the graph, and tracing took most of a case.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks


def told_of_held(
    model: nn.Module, data: tuple[Tensor, ...], precision: str, optimizer: str = "sgd",
    microbatches: int = 1,
) -> float:  # fmt: skip
    """Predicted over tracked bytes at the peak of a step."""
    plan, graph = _plan(model, data, precision, optimizer, num_microbatches=microbatches)
    return _told(plan, 0) / _held(model, plan, graph, data)


def told_of_pipeline(
    model: nn.Module, data: tuple[Tensor, ...], precision: str, **choice: Any
) -> list[float]:
    """The same of each of two ranks, which are two stages."""
    plan, graph = _plan(model, data, precision, "sgd", pp=2, **choice)
    held = run_ranks(2, _held, model, plan, graph, data)
    return [_told(plan, rank) / nbytes for rank, nbytes in enumerate(held)]


def told_of_pinned(
    model: nn.Module,
    data: tuple[Tensor, ...],
    precision: str,
    *pins: str,
    ranks: int = 2,
    recompute: str = "none",
    allow: tuple[str, ...] = (),
    steps: int = 2,
) -> list[float]:
    """The same of each rank, with AdamW and what a search finds with such pins. `allow`: of a
    search; `steps`: before the one whose tensors count."""
    torch.manual_seed(0)
    graph = trace(model, data, precision=precision)
    plan = search(
        graph, Cluster.local(ranks), optimizer="adamw", precision=precision,
        constraints=(*pins, f"recompute={recompute}"), allow=allow, progress=False,
    )  # fmt: skip
    stages = [next(i for i, s in enumerate(plan.stages) if r in s.devices) for r in range(ranks)]
    held = run_ranks(ranks, _held, model, plan, graph, data, steps)
    return [_told(plan, stage) / nbytes for stage, nbytes in zip(stages, held, strict=True)]


def _plan(
    model: nn.Module, data: tuple[Tensor, ...], precision: str, optimizer: str, **choice: Any
) -> tuple[Plan, Graph]:
    torch.manual_seed(0)
    traced = trace(model, data, precision=precision)
    cluster = Cluster.local(choice.get("pp", 1))
    made = make_problem(traced, cluster, precision=precision, optimizer=optimizer)
    return build_plan(made, uniform_choice(made, **choice)), traced


def _told(plan: Plan, stage: int) -> int:
    assert plan.predicted is not None
    return plan.predicted.stages[stage].memory.tensor_bytes


def _held(
    model: nn.Module, plan: Plan, graph: Graph, data: tuple[Tensor, ...], steps: int = 2
) -> int:
    job = compile_job(
        model, plan, optimizer=plan.optimizer, device="cpu", check=False, example_inputs=data,
        graph=graph,
    )  # fmt: skip
    return peak_of(job, data, steps)
