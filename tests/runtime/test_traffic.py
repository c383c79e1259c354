"""With the kernels that a search puts in for a GPU, a job of a model of Hugging Face has no more
pointwise work than plain PyTorch: no more kernels, and no more bytes read and written."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.kernels import AUTO, NONE, kernels_for
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.fake_gpu import process
from meshwright.testing.fake_gpu.beside import beside_guard
from tests.runtime.traffic import LENGTH, SAMPLES, Traffic, of_job, of_plain
from tests.runtime.wide_layers import gpt2, llama

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())


def _job(model: nn.Module, kernels: str) -> Traffic:
    cluster = mw.Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=1)
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    names, wins = kernels_for([cluster], kernels)
    graph = mw.trace(
        model, {"input_ids": ids, "labels": ids}, precision="bf16", kernels=names, wins=wins
    )
    problem = make_problem(graph, cluster, precision="bf16", optimizer="adamw")
    plan = build_plan(problem, uniform_choice(problem, recompute="none"), predict=False)
    found: Traffic = beside_guard(of_job, plan, graph)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(("build", "dropout"), [(gpt2, 0.0), (gpt2, 0.1), (llama, 0.0)])
def test_a_job_moves_no_more_than_plain_pytorch(
    build: Callable[[float], nn.Module], dropout: float
) -> None:
    plain: Traffic = beside_guard(of_plain, build, dropout)
    with torch.device("meta"):
        model = build(dropout).train()
    kernels, nbytes = _job(model, AUTO).beyond(plain)
    assert kernels <= 0 and nbytes <= 0
    assert _job(model, NONE).beyond(plain)[1] > nbytes, "which kernels make so"
