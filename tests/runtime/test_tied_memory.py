"""Memory of gradients that several blocks add to: predicted beside tracked bytes of tensors."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.peaks import peak_of


class _TiedEnds(nn.Module):
    """What it reads first it reads last, too, as language models do; and a block between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(2)
        )

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.table.weight), wanted)


@pytest.mark.parametrize("samples", [4, 256])
def test_a_tied_weights_gradient_is_there_from_the_last_reader_on(samples) -> None:
    """Its first reader makes one more beside it, which is the most of a small batch; that of a
    large one is in the loss, before there is any."""
    torch.manual_seed(0)
    model, data = _TiedEnds(), (torch.arange(samples) * 7, torch.arange(samples))
    cluster = Cluster.local(1)
    made = make_problem(trace(model, data), cluster, precision="fp32", optimizer="adamw")
    plan = build_plan(made, uniform_choice(made, num_microbatches=1))
    job = compile_job(
        model, plan, optimizer="adamw", device="cpu", check=False, example_inputs=data
    )
    counted = peak_of(job, data)
    assert plan.predicted is not None
    assert plan.predicted.stages[0].memory.tensor_bytes == pytest.approx(counted, rel=0.01)
