"""What a last product fused with its loss takes: less memory, as predicted and as tracked."""

from functools import cache

import pytest
import torch
from torch import Tensor

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels.linear_cross_entropy import rows_at_once
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.last_products import LastProduct
from meshwright.testing.peaks import peak_of

TOKENS, WIDTH, WORDS = 2048, 32, 8000


def batch() -> tuple[Tensor]:
    return (torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0)),)


@cache
def graph(kernels: tuple[str, ...]) -> Graph:
    return trace(LastProduct(WORDS, WIDTH), batch(), kernels=kernels)


def peaks(kernels: tuple[str, ...]) -> tuple[int, int]:
    """Predicted and tracked bytes of tensors on one device."""
    problem = make_problem(graph(kernels), Cluster.local(1), precision="fp32")
    plan = build_plan(problem, uniform_choice(problem), predict=False)
    job = compile_job(LastProduct(WORDS, WIDTH), plan, device="cpu", graph=graph(kernels))
    memory = predict_plan(problem, plan).stages[0].memory
    return memory.total_bytes - memory.fragmentation_bytes, peak_of(job, batch())


def test_less_is_predicted_and_tracked() -> None:
    (plain, plain_tracked), (fused, fused_tracked) = (
        peaks(kernels) for kernels in ((), ("linear_cross_entropy",))
    )
    # Logits, their logarithms, and gradients of both.
    assert plain == pytest.approx(plain_tracked, rel=0.02)
    logits = TOKENS * WORDS * 4
    assert plain_tracked - fused_tracked > logits and plain - fused > logits
    # What is inside of a call the tracker does not see: a chunk of logits, and its gradient, which
    # are not there with all of the rest: the optimizer steps when they have gone.
    chunk = rows_at_once(TOKENS, WIDTH, WORDS) * WORDS * 4
    assert chunk == logits // 4
    most = fused_tracked + 2 * chunk
    assert 0.96 * most < fused <= most
