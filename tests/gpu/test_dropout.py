"""A job with dropout has the losses of a CPU's job on any device: all draw the same masks."""

from functools import cache

import pytest
import torch

from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from tests.activated_jobs import activated, activated_graph, activated_losses, pairs, squared
from tests.gpu.devices import DEVICES, on_each
from tests.gpu.jobs import cluster

KERNELS: dict[str, tuple[str, ...]] = {"alone": (), "after GELU": ("bias_gelu",)}


def _losses(name: str, device: str) -> list[float]:
    with torch.device("cpu"):
        graph, batches = activated_graph(KERNELS[name]), [pairs(i) for i in (0, 1, 2, 9)]
        problem = make_problem(graph, cluster(device), precision="fp64", optimizer="sgd")
        plan = build_plan(problem, uniform_choice(problem, num_microbatches=2), predict=False)
        model = activated()
    job = compile_job(
        model, plan, graph=graph, optimizer="sgd", lr=0.1, loss_fn=squared, device=device
    )
    *steps, last = [tuple(x.to(device) for x in batch) for batch in batches]
    found = [float(job.step(batch)) for batch in steps] + [float(job.eval(last))]
    job.close()
    return found


@cache
def _found(device: str) -> dict[str, list[float]]:
    return on_each(device, _losses, [*KERNELS])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_job_drops_what_a_cpu_drops(device: str, name: str) -> None:
    assert _found(device)[name] == pytest.approx(activated_losses((), 1, {}), rel=1e-10)
