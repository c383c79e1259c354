"""What copies of parameters take is predicted: bytes of tensors on a rank, and messages."""

from functools import cache
from typing import Any

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import StagePrediction
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.deep import PARAMETERS, Deep, batch
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks


@cache
def graph(precision: str) -> Graph:
    return trace(Deep(), batch(), precision=precision)


def planned(precision: str, **choice: Any) -> tuple[Plan, StagePrediction]:
    ranks = choice.get("dp_shard", 1) * choice.get("dp_replicate", 1)
    problem = make_problem(graph(precision), Cluster.local(ranks), optimizer="adamw")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    return plan, predict_plan(problem, plan).stages[0]


def most(plans: list[Plan]) -> list[int]:
    """The most bytes of tensors in the third step."""
    found = []
    for plan in plans:
        job = compile_job(
            Deep(), plan, optimizer="adamw", device="cpu", graph=graph(plan.precision)
        )
        found.append(peak_of(job, batch()))
    return found


CHOICES: dict[tuple[str, int], list[tuple[dict[str, Any], float]]] = {
    ("bf16", 1): [({}, 18), ({"num_microbatches": 2}, 18)],
    ("bf16", 4): [
        ({"dp_replicate": 4}, 18), ({"dp_shard": 4, "zero": 1}, 2 + 3 * 4 / 4 + 2),
        ({"dp_shard": 4, "zero": 1, "num_microbatches": 2}, 2 + 3 * 4 / 4 + 4),
        ({"dp_shard": 4, "zero": 2, "num_microbatches": 2}, 2 + 4 * 4 / 4 + 2),
        ({"dp_shard": 4, "zero": 3}, 4 * 4 / 4),
    ],
    ("bf16-sums", 4): [
        ({"dp_shard": 4, "zero": 1, "num_microbatches": 2}, 2 + 3 * 4 / 4 + 2),
        ({"dp_shard": 4, "zero": 2, "num_microbatches": 2}, 2 + 3 * 4 / 4 + 2 / 4 + 2),
        ({"dp_shard": 4, "zero": 3, "num_microbatches": 2}, 4 * 4 / 4),
    ],
    ("bf16, layers.1=fp32, layers.4=fp32", 4): [
        ({"dp_replicate": 4}, (2 * 18 + 16) / 3),
        # Gradients of one kind have left before the peak.
        ({"dp_shard": 4, "zero": 1}, 0), ({"dp_shard": 4, "zero": 1, "num_microbatches": 2}, 0),
        ({"dp_shard": 4, "zero": 3}, 4 * 4 / 4),
    ],
}  # fmt: skip
"""By precision and ranks: plans, and bytes that stay per parameter as Megatron's formula has them;
what is on its way comes on top. ZeRO 2 sends a bucket of all, in bfloat16 before it is packed."""


@pytest.mark.sampled
@pytest.mark.parametrize(("precision", "world"), CHOICES)
def test_tracked_memory_is_as_predicted(precision: str, world: int) -> None:
    choices = CHOICES[precision, world]
    said = [planned(precision, **choice) for choice, _ in choices]
    found = run_ranks(world, most, [plan for plan, _ in said])[0]
    for (choice, each), (_, predicted), tracked in zip(choices, said, found, strict=True):
        memory = predicted.memory
        assert memory.tensor_bytes == pytest.approx(tracked, rel=0.003), choice
        moving = memory.communication_bytes + memory.workspace_bytes
        at_peak = each * PARAMETERS
        if each and choice.get("zero", 0) < 3:  # whose peak has only some of the gradients
            assert tracked - moving == pytest.approx(at_peak, rel=0.01), choice
