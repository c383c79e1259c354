"""Memory of tables with a cache, and what it costs to bring rows: as predicted."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.estimate import estimate_all
from meshwright.forms.host_link import shaped
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.predicted import StagePrediction
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.hosts import apart
from meshwright.testing.spawn import run_ranks

ROWS, WIDTH, SAMPLES, SLOTS = 20_000, 32, 64, 10_000
TABLE = ROWS * WIDTH * 4
LINK = 50e6


class Looking(nn.Module):
    """One large table, and a small rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(ids)).square().mean()
        return found


def batch(step: int) -> tuple[Tensor]:
    """Rows that no other batch has."""
    return (torch.arange(SAMPLES) * 7 + step * SAMPLES * 7,)


@cache
def graph() -> Graph:
    return trace(Looking(), batch(0))


def plan_of(
    ranks: int, optimizer: str, cached: bool = True, **settings: Any
) -> tuple[Plan, StagePrediction]:
    """With what is predicted of its stage."""
    problem = make_problem(graph(), apart(ranks, LINK), precision="fp32", optimizer=optimizer)
    plan = build_plan(problem, uniform_choice(problem, dp_shard=ranks, zero=1), predict=False)
    share = SAMPLES / ROWS
    # The first of two ranks owns all of them.
    facts = {"rows": share, "rows_each": share / ranks, "row_bytes": 4 * WIDTH, "ids": "0",
             "busiest": float(ranks)}  # fmt: skip
    sync = FormChoice(form="owned_rows", settings=facts) if ranks > 1 else None
    told = {"ratio": SLOTS / ROWS, "rows": share, "missing": ranks * share, "row_bytes": 4 * WIDTH,
            "ids": "0", **settings}  # fmt: skip
    store = FormChoice(form="cached", settings=told) if cached else None
    own = ParameterChoice(zero=1 if ranks > 1 else 0, sync=sync, store=store)
    if cached or ranks > 1:
        plan = replace(plan, stages=(replace(plan.stages[0], by_parameter={"words.weight": own}),))
    return plan, predict_plan(problem, plan).stages[0]


def most(plans: list[Plan]) -> list[tuple[int, int]]:
    """The most bytes of tensors in the third step, and those of the table on the host."""
    found = []
    for plan in plans:
        job = compile_job(
            Looking(), plan, optimizer=plan.optimizer, device="cpu", example_inputs=batch(0),
            graph=graph(), check=False,
        )  # fmt: skip
        for step in range(2):
            job.step(batch(step), next_batch=batch(step + 1))
        job.track_memory(batch(2), next_batch=batch(3))
        memory = job.tensor_memory
        assert memory is not None
        host = sum(x.nbytes for stage in job.parts.stages.values() for x in stage.sync.on_host)
        found.append((memory.peak_bytes, host))
        job.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_as_predicted(ranks: int) -> None:
    """The device has slots, what the optimizer keeps of them, and rows of a batch; the host all."""
    optimizers = {"sgd": 0, "adagrad": 1}
    said = [plan_of(ranks, name) for name in optimizers]
    with shaped(LINK):
        found = run_ranks(ranks, most, [plan for plan, _ in said])[0]
    for copies, (_, predicted), (tracked, host) in zip(
        optimizers.values(), said, found, strict=True
    ):
        slots = SLOTS // ranks * WIDTH * 4 * (1 + copies)
        small = (WIDTH + 1) * 4
        assert predicted.memory.tensor_bytes == pytest.approx(tracked, rel=0.01)
        assert slots < tracked < slots + 0.1 * TABLE
        assert predicted.memory.host_bytes == TABLE // ranks * (1 + copies)
        assert host == TABLE // ranks
        known = predicted.memory.parameters_bytes + predicted.memory.optimizer_bytes
        assert known - slots == pytest.approx(small * (1 + copies), abs=2 * small)


def test_rows_that_come_ahead_are_hidden_by_the_step_and_others_are_waited_for() -> None:
    """A step takes what all missing rows take over the link, or nothing of it; optimizers that
    change all rows have them on the host."""
    missing_s = SAMPLES * WIDTH * 4 / LINK

    def step_s(**settings: Any) -> float:
        return _step_s(plan_of(1, "sgd", **settings)[0])

    now, ahead = step_s(prefetch=0), step_s(prefetch=1)
    assert 0.5 * missing_s < now - ahead <= 1.5 * missing_s
    more = step_s(prefetch=0, missing=10 * SAMPLES / ROWS)
    assert more - now == pytest.approx(9 * missing_s, rel=0.2)
    kept = _step_s(plan_of(1, "adagrad", prefetch=0)[0])
    assert 0.9 * missing_s < kept - now < 1.5 * missing_s  # its state comes too
    on_host = plan_of(1, "adamw")[1].memory
    assert on_host.host_bytes == 3 * TABLE and on_host.optimizer_bytes < 0.01 * TABLE


def _step_s(plan: Plan) -> float:
    cluster = apart(1, LINK)
    problem = make_problem(graph(), cluster, precision="fp32", optimizer=plan.optimizer)
    return estimate_all(graph(), cluster, plan, problem.tables).prediction.step_s
