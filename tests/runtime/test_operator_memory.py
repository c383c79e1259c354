"""Memory of a step whose most is inside one operator's backward: predicted beside tracked bytes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent_cells import CELLS, Recurrent
from tests.told_memory import told_of_held, told_of_pipeline
from tests.wide_layers import WideLayers

F = nn.functional


def _attend(y: Tensor) -> Tensor:
    """Four heads of queries and two of keys, under a mask with a gradient: no kernel is for it."""
    parts = zip(y.split([128, 64, 64], -1), (4, 2, 2), strict=True)
    query, key, value = (x.unflatten(-1, (n, 32)).transpose(1, 2) for x, n in parts)
    mask = y[0, :, :64]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: ((y - 1) ** 2).mean(),
    "erf": lambda y: y.erf().mean(),
    "quotient": lambda y: (y / (y * y + 1)).mean(),
    "quotient of rows": lambda y: (y / (y.abs().sum(-1, keepdim=True) + 1)).mean(),
    "product with means": lambda y: (y * y.mean(-1, keepdim=True)).mean(),
    "one column": lambda y: y.log_softmax(-1)[..., 0].mean(),
    "neighbours": lambda y: (y[:, :-1] * y[:, 1:]).mean(),
    "halves": lambda y: (F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]).mean(),
    "rows of a list": lambda y: y[torch.arange(0, 512, 2)].mean(),
    "clamp": lambda y: y.clamp(-1, 1).mean(),
    "squares of rows": lambda y: F.layer_norm(y, (256,)).pow(2).mean(),
    "binary cross-entropy of two": lambda y: F.binary_cross_entropy(
        y.sigmoid(), y.flip(-1).sigmoid()
    ),
    "squares of two": lambda y: F.mse_loss(y, y.flip(-1).sin()),
    "divergence": lambda y: F.kl_div(y.log_softmax(-1), torch.ones_like(y) / 256),
    "divergence of two": lambda y: F.kl_div(y.log_softmax(-1), y.flip(-1).softmax(-1)),
    "divergence of logarithms": lambda y: F.kl_div(
        y.log_softmax(-1), y.flip(-1).log_softmax(-1), log_target=True
    ),
    "distances": lambda y: torch.cdist(y.sin(), y.cos()[:64]).mean(),
    "few distances": lambda y: torch.cdist(y[:, :96].sin(), y[:16, 96:192].cos(), p=1.0).mean(),
    "distances from the first": lambda y: torch.cdist(y, y[:16], p=1.0).mean(),
    "real transform": lambda y: torch.fft.irfft(torch.fft.rfft(y) * 2, n=256).sin().mean(),
    "whole transform": lambda y: (y + torch.fft.fft2(y).real * 0.01).sin().mean(),
    "shared keys": lambda y: _attend(y.view(8, 64, 256)).sin().mean(),
    "sum": lambda y: y.square().sum() / y.numel(),
    "sums of rows": lambda y: y.square().sum(-1).sin().mean(),
    "root mean square": lambda y: F.rms_norm(y, (256,)).exp().mean(),
    "unit rows": lambda y: F.normalize(y, dim=-1)[..., 0].mean(),
}


class _Reads(nn.Module):
    """A part of a large buffer, before all that depends on data."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 256)
        self.register_buffer("table", torch.randn(512, 512), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.into(x) + self.table[0, 0]).tanh().mean()


class _Loss(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.of = nn.Linear(64, 256), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.into(x))


@pytest.mark.parametrize("name", LOSSES)
def test_what_backwards_hold_inside_is_predicted(name: str) -> None:
    _check(_Loss(LOSSES[name]))


def test_means_over_parts_are_sums_that_are_divided() -> None:
    """The gradient of what is summed is a view, spread out."""
    data = (torch.randn(512, 64),)
    told = told_of_held(_Loss(lambda y: y.exp().mean()), data, "fp32", microbatches=2)
    assert told == pytest.approx(1.0, abs=0.001)


class _Normed(nn.Module):
    """Layers behind norms that torch runs operator after operator on a CPU, in float32."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(64, elementwise_affine=weighted), nn.Linear(64, 64), nn.GELU())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_norms_by_the_root_mean_square_hold_squares(precision: str, weighted: bool) -> None:
    told = told_of_held(_Normed(weighted=weighted), (torch.randn(512, 64),), precision)
    assert told == pytest.approx(1.0, abs=0.01)


def test_gradients_that_a_block_was_given_are_there_to_its_end() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 1024), nn.Linear(1024, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(x).sin().exp()).tanh().mean()

    _check(Wide())


class _Twice(nn.Module):
    """Weights that one block reads twice, and more of them than of values: their gradients are
    added up, those of a linear layer not in place, before they are added to earlier ones."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.into, self.twice = nn.Linear(64, 256), nn.Linear(256, 256)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        for _ in range(2):
            y = y.tanh()
            y = self.twice(y) if self.linear else y @ self.twice.weight + self.twice.bias
        return y.mean()


@pytest.mark.parametrize("linear", [True, False])
def test_gradients_of_weights_that_are_read_twice(linear: bool) -> None:
    for microbatches in (1, 8):
        model, data = _Twice(linear=linear), (torch.randn(128, 64),)
        told = told_of_held(model, data, "fp32", microbatches=microbatches)
        assert told == pytest.approx(1.0, abs=0.01)


def test_what_a_stage_sends_and_saves_is_there_once() -> None:
    data = (torch.randn(4096, 64),)
    first, _ = told_of_pipeline(
        WideLayers(64, 64, 4), data, "fp32", num_microbatches=8, schedule="gpipe"
    )
    assert first == pytest.approx(1.0, abs=0.002)


def _contrasted(y: Tensor, target: Tensor) -> Tensor:
    first, second = F.normalize(y, dim=-1).chunk(2, -1)
    return F.cross_entropy(first @ second.t() / 0.1, target.argmax(-1)) + target.mean()


GIVEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "huber": F.huber_loss,
    "smooth l1": F.smooth_l1_loss,
    "squares": F.mse_loss,
    "shares of classes": lambda y, target: F.cross_entropy(y, target.softmax(-1)),
    "given shares of classes": F.cross_entropy,
    "chances": F.binary_cross_entropy_with_logits,
    "contrast": _contrasted,
}


class _Given(nn.Module):
    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.of = nn.Linear(64, 256), of

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.of(self.into(x), target)


@pytest.mark.parametrize("name", GIVEN)
def test_losses_hold_a_target_of_the_batch_once(name: str) -> None:
    told = told_of_held(_Given(GIVEN[name]), (torch.randn(256, 64), torch.rand(256, 256)), "fp32")
    assert told == pytest.approx(1.0, abs=0.01)


class _ReadAgain(nn.Module):
    """What the first layer makes is read by the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x + first).tanh().mean()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_of_what_is_read_again_wait_for_the_block_that_made_it(microbatches: int) -> None:
    data = (torch.randn(1024, 64),)
    told = told_of_held(_ReadAgain(), data, "fp32", microbatches=microbatches)
    assert told == pytest.approx(1.0, abs=0.005)


RECURRENT = {
    "one layer": {"num_layers": 1},
    "three wide layers": {"num_layers": 3, "hidden_size": 128},
    "two directions": {"num_layers": 2, "bidirectional": True},
    "steps first": {"num_layers": 2, "batch_first": False},
    "dropout": {"num_layers": 3, "dropout": 0.1},
    "no biases": {"num_layers": 2, "bias": False},
}


@pytest.mark.parametrize("name", RECURRENT)
def test_rooms_of_onednn_are_predicted(name: str) -> None:
    told = told_of_held(Recurrent(**RECURRENT[name]), (torch.randn(16, 32, 32),), "fp32")
    assert told == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("name", CELLS)
def test_what_cells_of_each_step_hold_is_predicted(name: str) -> None:
    kind, given, samples = CELLS[name]
    model, data = Recurrent(kind, **given), torch.randn(samples, 32, 32)
    precision = "fp32"
    if kind is nn.LSTM:
        model, data, precision = model.double(), data.double(), "fp64"
    assert told_of_held(model, (data,), precision) == pytest.approx(1.0, abs=0.01)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU steps through such LSTMs"
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith("lstm")])
def test_what_lstms_of_onednn_hold_is_predicted(name: str, precision: str) -> None:
    kind, given, samples = CELLS[name]
    data = torch.randn(samples, 32, 32)
    found = told_of_held(Recurrent(kind, **given), (data,), precision)
    assert found == pytest.approx(1.0, abs=0.01)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith("projected")])
def test_lstms_that_project_are_not_those_of_onednn(name: str) -> None:
    """Also in float32, in which that takes others."""
    kind, given, samples = CELLS[name]
    found = told_of_held(Recurrent(kind, **given), (torch.randn(samples, 32, 32),), "fp32")
    assert found == pytest.approx(1.0, abs=0.01)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith("projected")])
def test_weights_that_autocast_casts_for_each_step_are_there(name: str) -> None:
    """That of a projection is turned in each step, so that it is no leaf of which one copy is kept;
    the state of cells stays in float32."""
    kind, given, samples = CELLS[name]
    data = torch.randn(samples, 32, 32)
    found = told_of_held(Recurrent(kind, **given), (data,), "bf16-autocast")
    assert found == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith(("rnn", "gru"))])
def test_narrow_products_of_cells_are_predicted(name: str, precision: str) -> None:
    """States of a GRU stay in float32 under autocast, those of plain RNNs do not. Initial states
    are there until the forward has read them, as copies are kept."""
    kind, given, samples = CELLS[name]
    data = torch.randn(samples, 32, 32)
    found = told_of_held(Recurrent(kind, **given), (data,), precision)
    assert found == pytest.approx(1.0, abs=0.005)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_gradients_of_copies_are_cast_in_the_order_of_parameters() -> None:
    """Those that come later are narrow while the largest is cast."""
    kind, given, samples = CELLS["projected lstm of few samples"]
    data = torch.randn(samples, 32, 32)
    found = told_of_held(Recurrent(kind, **given), (data,), "bf16")
    assert found == pytest.approx(1.0, abs=0.002)


def test_buffers_that_nothing_but_a_prelude_reads_are_there() -> None:
    _check(_Reads())


def _check(model: nn.Module) -> None:
    told = told_of_held(model, (torch.randn(512, 64),), "fp32")
    assert told == pytest.approx(1.0, abs=0.01)
