"""Recurrent networks by alternating directions: ranks equal one process, the Lagrangian falls."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.forms.methods import METHODS, method_findings, with_method
from meshwright.forms.recurrent import check_forward, recurrent_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.by_method import by_method
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.recurrent_nets import LastState, sequences
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.check import check_plan, read_plan

SAMPLES, HIDDEN, STEPS = 60, 12, 6
SHARES = {1: (60,), 2: (47, 13), 3: (31, 8, 21)}


def net() -> nn.Module:
    torch.manual_seed(3)
    return LastState(HIDDEN).double()


@cache
def samples() -> tuple[Tensor, Tensor]:
    return sequences(SAMPLES)


@cache
def graph() -> Graph:
    return trace(net(), samples(), F.cross_entropy)


def plan(ranks: int, **settings: Any) -> Plan:
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64")
    found = build_plan(problem, uniform_choice(problem, dp_replicate=ranks))
    stages = (replace(found.stages[0], batch_shares=SHARES[ranks]),)
    return with_method(replace(found, stages=stages), "admm", **{"penalty": 1e4, **settings})


Trained = tuple[list[float], dict[str, Tensor], int, int]


def trained(given: Plan, steps: int = STEPS) -> Trained:
    """Values, parameters, bytes that were summed and those of the formula."""
    model = net()
    job = by_method(model, given, samples(), loss_fn=F.cross_entropy)
    values = [float(job.step()) for _ in range(steps)]
    job.sync_to()
    state = {name: x.detach().clone() for name, x in model.named_parameters()}
    return values, state, job.sums.nbytes, steps * sum(x.nbytes for x in job.described)


@cache
def serial(**settings: float) -> Trained:
    return alone(trained, plan(1, **settings))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_unequal_shares_equal_one_process(ranks: int) -> None:
    wanted, state, *_ = serial()
    for values, found, sent, formula in run_ranks(ranks, trained, plan(ranks)):
        assert values == pytest.approx(wanted, rel=1e-10)
        assert sent == formula
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert max((state[n] - p).abs().max() for n, p in net().named_parameters()) > 1e-2


def test_late_sums_of_no_delay_are_the_exact_ones_and_others_converge() -> None:
    found = {s: run_ranks(2, trained, plan(2, stale=s), 40)[0][0] for s in (0, 1, 2)}
    assert found[0][:STEPS] == pytest.approx(serial()[0], rel=1e-10)
    for late, least in ((1, 0.65), (2, 0.8)):
        assert found[late - 1][-1] < found[late][-1] < least * found[late][0], found[late]


def test_the_lagrangian_never_rises() -> None:
    values = alone(trained, plan(1), 60)[0]
    assert all(b <= a for a, b in pairwise(values))
    assert values[-1] < 0.4 * values[0]


def resumed(folder: Path, before: Plan | None, after: Plan, more: int) -> list[float]:
    """What iterations after a checkpoint make; `before` writes it."""
    if before is not None:
        job = by_method(net(), before, samples(), loss_fn=F.cross_entropy)
        for _ in range(STEPS - more):
            job.step()
        job.save(folder)
    job = by_method(LastState(HIDDEN).double(), after, samples(), loss_fn=F.cross_entropy)
    job.load(folder)
    assert job.steps == STEPS - more
    return [float(job.step()) for _ in range(more)]


@pytest.mark.parametrize("stale", [0, 2])
def test_it_goes_on_from_a_checkpoint(stale: int, tmp_path: Path) -> None:
    two = plan(2, stale=stale)
    wanted = run_ranks(2, trained, two)[0][0]
    for found in run_ranks(2, resumed, tmp_path, two, two, 3):
        assert found == pytest.approx(wanted[-3:], rel=1e-12)
    if not stale:  # what each rank adds to late sums depends on how many there are
        assert alone(resumed, tmp_path, None, plan(1), 3) == pytest.approx(wanted[-3:], rel=1e-9)


def test_a_plan_names_it_as_data(tmp_path: Path) -> None:
    made = plan(2, stale=1)
    made.save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.plan == rehash(made) and not check_plan(read, graph(), Cluster.local(2)).is_broken
    assert "admm penalty=10000.0 stale=1" in str(made) and "without gradients" in str(made)
    assert made.predicted is None and read.plan.hash != rehash(replace(made, method=None)).hash
    with pytest.raises(PlanError, match=r"trains by admm.*mw\.by_method"):
        compile_job(net(), plan(1), graph=graph(), device="cpu")


def test_what_does_not_go_with_it_is_refused() -> None:
    assert "admm" in METHODS
    good = plan(1)
    stage = good.stages[0]
    wrong = {
        "precision fp64": replace(good, precision="bf16"),
        "micro-batches": replace(good, num_microbatches=2),
        "zero 0": replace(good, stages=(replace(stage, zero=1, mesh={"dp_shard": 2}),)),
        "tp 1": replace(good, stages=(replace(stage, mesh={"tp": 2}),)),
    }
    for near, given in wrong.items():
        assert near in " ".join(map(str, method_findings(given))), near
    asked = [("admn", {}, "nearest: admm"), ("admm", {"rho": 1}, "no setting"),
             ("admm", {"stale": 99}, "from 0 to 8")]  # fmt: skip
    for key, settings, text in asked:
        with pytest.raises(PlanError, match=text):
            with_method(replace(good, method=None), key, **settings)
    x, y = torch.zeros(2, 3), torch.zeros(2)
    for given, text in (({"x": x, "y": y}, r"a dict of x, y.*tuple \(x, y\)"), ((x,), "1 in all")):
        with pytest.raises(PlanError, match=text):
            by_method(nn.Linear(3, 2), good, given)  # type: ignore[arg-type]


class Gated(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 4, **{"batch_first": True, **settings})
        self.out = nn.Linear(4 * (1 + settings.get("bidirectional", False)), 10)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.scale * self.rnn(x)[0][:, -1])
        return found


def test_other_models_are_refused() -> None:
    for settings in ({"nonlinearity": "relu"}, {"num_layers": 2}, {"bidirectional": True},
                     {"batch_first": False}, {"bias": False}):  # fmt: skip
        with pytest.raises(PlanError, match=rf"{next(iter(settings))} of the model"):
            recurrent_of(Gated(**settings))
    with pytest.raises(PlanError, match=r"0 nn\.RNN and 1 nn.Linear"):
        recurrent_of(nn.Linear(2, 2))
    model = Gated()
    check_forward(recurrent_of(model), model, torch.randn(3, 5, 8))
    model.scale = 2.0
    with pytest.raises(PlanError, match="something else"):
        check_forward(recurrent_of(model), model, torch.randn(3, 5, 8))
    model.other = nn.Parameter(torch.zeros(3))
    with pytest.raises(PlanError, match="a parameter 'other' besides"):
        recurrent_of(model)
