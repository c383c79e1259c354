"""Networks of convolutions and batch norm whose ranks share batches: as one process, in the memory
that is predicted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks

F = nn.functional
MESSAGE = 4 * 16 * 16 * 16 * 4
"""Bytes of what the first stage sends of a micro-batch, and of its gradient."""


class _Block(nn.Module):
    def __init__(self, read: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(read, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(made) for _ in range(2))
        self.down = nn.Identity() if stride == 1 else nn.Conv2d(read, made, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.down(x))


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.layers = nn.Sequential(
            _Block(16, 16, 1), _Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 32, 1)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


def _model(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = _ResNet()
    return model.double() if precision == "fp64" else model


def _batch(precision: str) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return torch.randn(8, 3, 64, 64, dtype=dtype), torch.randint(10, (8,))


def _plan(precision: str, data: tuple[Tensor, ...], ranks: int, **choice: Any) -> Plan:
    graph = trace(_model(precision), data, precision=precision)
    problem = make_problem(graph, Cluster.local(ranks), precision=precision, optimizer="sgd")
    return build_plan(problem, uniform_choice(problem, **choice))


def _job(plan: Plan, data: tuple[Tensor, ...]) -> Any:
    return compile_job(
        _model(plan.precision), plan, optimizer="sgd", device="cpu", check=False,
        example_inputs=data,
    )  # fmt: skip


def _most(plan: Plan, data: tuple[Tensor, ...]) -> int:
    return peak_of(_job(plan, data), data)


def _losses(plan: Plan, data: tuple[Tensor, ...]) -> list[float]:
    job = _job(plan, data)
    found = [float(job.step(data)) for _ in range(3)]
    job.close()
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_norms_over_replicas_hold_what_is_predicted(zero: int) -> None:
    data = _batch("fp32")
    plan = _plan("fp32", data, 2, dp_shard=2, zero=zero)
    assert plan.predicted
    told = plan.predicted.stages[0].memory.tensor_bytes
    for held in run_ranks(2, _most, plan, data):
        assert told / held == pytest.approx(1.0, abs=0.01)


def test_stages_hold_what_is_predicted() -> None:
    data = _batch("fp32")
    plan = _plan("fp32", data, 2, pp=2, num_microbatches=2, schedule="one_f_one_b")
    assert plan.predicted
    held = run_ranks(2, _most, plan, data)
    for stage, nbytes in zip(plan.predicted.stages, held, strict=True):
        # A message each way counts all the time, and is there at the most or is not.
        assert 0.999 * nbytes <= stage.memory.tensor_bytes <= 1.001 * nbytes + 2 * MESSAGE


def test_two_ranks_train_as_one() -> None:
    data = _batch("fp64")
    (alone,) = run_ranks(1, _losses, _plan("fp64", data, 1), data)
    assert alone[2] < alone[0]
    for choice in ({"dp_shard": 2}, {"dp_shard": 2, "zero": 3}, {"pp": 2}):
        for found in run_ranks(2, _losses, _plan("fp64", data, 2, **choice), data):
            assert found == pytest.approx(alone, rel=1e-11)
