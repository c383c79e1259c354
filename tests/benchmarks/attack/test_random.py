"""What forward draws at random is the same under every layout, and is drawn again as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attack.layouts import attack, plan_of
from benchmarks.attack.noisy import NOISY
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.noise import noise
from meshwright.ir.errors import TraceError
from meshwright.ir.trace.trace import trace
from meshwright.planner.discovery import rule as discovery
from meshwright.planner.search.random_notes import random_notes
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone
from tests.planner.simulated_ops import run_whole


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_SEEN", {})


ALL = ("x2", "dp2", "zero3", "recompute", "tp2", "pp2", "pp2_tp2")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("vae", ALL),
        ("vae_rsample", ("dp2",)),
        ("vae_codes", ("pp2_tp2",)),
        ("masked", ("x2", "zero3")),
        ("rand_flat", ("pp2_tp2",)),
        ("rand_turned", ("dp2",)),
        ("rand_shared", ("pp2_tp2",)),
        ("categorical", ("dp2",)),
        ("stochastic_depth", ("zero3",)),
        ("dropout", ("x2", "tp2", "pp2_tp2")),
        ("attention", ("dp2", "tp2")),
        ("alpha_dropout", ("pp2_tp2",)),
        ("dropout_2d", ("dp2",)),
        ("rrelu", ("recompute",)),
    ],
)
def test_every_layout_draws_the_same(name: str, layouts: tuple[str, ...]) -> None:
    for result in attack(name, layouts):
        assert result.what.startswith("equal"), str(result)


def at(offset: int) -> Comm:
    comm = Comm({}, {"dp": 1}, {"dp": 0})
    comm.sample_offset = offset
    return comm


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_part_of_the_samples_draws_its_part_of_the_noise(kind: str) -> None:
    # Two sections, in each three elements of every sample.
    whole = noise(at(0), (24, 5), kind, torch.float64, "op", 0, 2, 3).view(2, 4, 3, 5)
    part = noise(at(1), (12, 5), kind, torch.float64, "op", 0, 2, 3).view(2, 2, 3, 5)
    assert torch.equal(part, whole[:, 1:3])
    assert whole.unique().numel() == whole.numel()


def test_noise_of_no_sample_is_the_same_everywhere_and_new_each_step() -> None:
    first, second = (noise(at(i), (4,), "normal", torch.float32, "op") for i in range(2))
    assert torch.equal(first, second)
    later = at(0)
    later.step = 1
    assert not torch.equal(noise(later, (4,), "normal", torch.float32, "op"), first)


DRAWS: dict[str, Any] = {
    "rand_like": torch.rand_like,
    "randn": lambda y: torch.randn(y.shape),
    "randint": lambda y: torch.randint(3, 9, y.shape).float(),
    "random": lambda y: torch.empty_like(y).random_(5),
    "bernoulli": lambda y: torch.bernoulli(torch.full_like(y, 0.3)),
    "bernoulli_in_place": lambda y: torch.empty_like(y).bernoulli_(0.7),
    "normal": lambda y: torch.normal(torch.full_like(y, 2.0), torch.full_like(y, 3.0)),
    "normal_in_place": lambda y: torch.empty_like(y).normal_(-1.0, 0.5),
    "uniform": lambda y: torch.empty_like(y).uniform_(-2.0, 1.0),
    "exponential": lambda y: torch.empty_like(y).exponential_(2.0),
    "geometric": lambda y: torch.empty_like(y).geometric_(0.3),
    "log_normal": lambda y: torch.empty_like(y).log_normal_(0.5, 0.2),
    "cauchy": lambda y: torch.empty_like(y).cauchy_(1.0, 0.1).clamp(0, 2),
    "poisson": lambda y: torch.poisson(torch.full_like(y, 1.5)),
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.3, training=True),
    "dropout_1d": lambda y: F.dropout1d(y.expand(-1, -1, 50), 0.3).mean(-1),
    "rrelu": lambda y: F.rrelu(-y.abs(), training=True),
}


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(1, 1), draw

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x).detach()
        drawn = self.draw(y)
        return {"loss": drawn.mean() + 1e3 * drawn.std() + self.linear(x[:1]).sum() * 0}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_as_torch_distributes_them(name: str) -> None:
    torch.manual_seed(4)
    model, x = Drawing(DRAWS[name]), torch.randn(20000, 1, 1)
    graph = trace(model, {"x": x})
    values = run_whole(graph, model, {"x": x})
    ours = float(values[graph.loss])
    assert ours == pytest.approx(float(model(x)["loss"].detach()), rel=0.03)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.alpha = nn.Linear(6, 6), nn.AlphaDropout(0.4)
        self.channels, self.slope = nn.Dropout1d(0.4), nn.RReLU()
        self.steps = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.slope(self.channels(self.alpha(self.linear(x))))
        return {"loss": self.steps(x)[0].square().mean()}


def evaluated() -> tuple[float, float, float]:
    torch.manual_seed(0)
    model, x = Dropping().double(), {"x": torch.randn(8, 3, 6).double()}
    graph = trace(model, x)
    job = compile_job(model, plan_of(graph, {}), graph=graph, optimizer="sgd", lr=0.0)
    trained, found = float(job.step(x)), float(job.eval(x))
    job.close(sync=True)
    return trained, found, float(model.eval()(**x)["loss"].detach())


def test_evaluation_drops_nothing() -> None:
    trained, found, wanted = alone(evaluated)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert trained != pytest.approx(wanted, rel=1e-3)


class Drawn(nn.Module):
    """Draws whose constants in a self-check must be torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.alpha, self.channels = (
            nn.Linear(6, 6),
            nn.AlphaDropout(0.4),
            nn.Dropout1d(),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.channels(self.alpha(self.linear(x)))
        x = x + torch.randn_like(x) * torch.bernoulli(torch.full_like(x, 0.3)) + torch.rand_like(x)
        x = x + torch.empty_like(x).exponential_(2.0) + torch.empty_like(x).cauchy_(1.0, 2.0)
        x = x * torch.randint_like(x, 2, 9) + torch.empty_like(x).uniform_(1.0, 3.0)
        return {"loss": (x * torch.empty_like(x).log_normal_(0.5, 0.5)).square().mean()}


def self_checked() -> str:
    torch.manual_seed(0)
    model, x = Drawn().double(), {"x": torch.randn(8, 3, 6).double()}
    graph = trace(model, x)
    job = compile_job(model, plan_of(graph, {}), graph=graph, optimizer="sgd", lr=0.1, check=True)
    job.close()
    return str(job.checked)


def test_the_self_check_draws_the_constants_of_torch() -> None:
    said = alone(self_checked)
    assert "one step of the plan" in said and "not checked" not in said


def test_a_plan_says_which_dropout_depends_on_it() -> None:
    for name, choice in (
        ("attention", {"tp": 2}),
        ("attention", {"dp_shard": 2, "zero": 3}),
        ("dropout", {"tp": 2}),
    ):
        model = NOISY[name]
        graph = trace(model.made(), model.batch(8, torch.Generator()), model.loss)
        assert not [*random_notes(graph, plan_of(graph, choice))]
    graph = trace(Dropping(), {"x": torch.randn(8, 3, 6)})
    (note,) = random_notes(graph, plan_of(graph, {"dp_shard": 2}))
    assert "dropout inside recurrent layers draws other masks when the batch is split" in note
    assert not [*random_notes(graph, plan_of(graph, {}))]


def test_a_draw_without_a_derivative_is_refused() -> None:
    model = NOISY["vae_dirichlet_gradient"]
    with pytest.raises(TraceError, match="has no derivative"):
        trace(model.made(), model.batch(8, torch.Generator()), model.loss)
