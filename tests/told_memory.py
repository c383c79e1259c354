"""Memory of a plan for one process on a CPU, beside what its tensors hold."""

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.peaks import peak_of


def told_of_held(
    model: nn.Module, data: tuple[Tensor, ...], precision: str, optimizer: str = "sgd",
    microbatches: int = 1,
) -> float:  # fmt: skip
    """Predicted over tracked bytes at the peak of a step."""
    torch.manual_seed(0)
    traced = trace(model, data, precision=precision)
    made = make_problem(traced, Cluster.local(1), precision=precision, optimizer=optimizer)
    plan = build_plan(made, uniform_choice(made, num_microbatches=microbatches))
    job = compile_job(
        model, plan, optimizer=optimizer, device="cpu", check=False, example_inputs=data
    )  # fmt: skip
    assert plan.predicted is not None
    return plan.predicted.stages[0].memory.tensor_bytes / peak_of(job, data)
