"""Memory of backwards that are split in halves, of parameters that layouts keep in parts, and of
experts: predicted beside tracked bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent_cells import CELLS, Recurrent
from tests.small_languages import Language, mixtral
from tests.told_memory import told_of_pinned, told_of_pipeline

HALVES = {"num_microbatches": 4, "schedule": "zero_bubble"}


def _of_cells(name: str, precision: str, samples: int = 64, **choice: Any) -> float:
    """Of two stages, the first is a linear layer, which holds little but messages."""
    kind, given, _ = CELLS[name]
    data = (torch.randn(samples, 32, 32),)
    model = Recurrent(kind, **{**given, "batch_first": True})
    return told_of_pipeline(model, data, precision, **choice)[1]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gru", "fp32"),
        ("gru of three layers", "bf16"),
        ("gru of two layers and directions", "fp32"),
        ("rnn of three layers", "fp32"),
        ("rnn of two directions", "bf16"),
        ("projected lstm of two layers", "fp32"),
        ("lstm of two directions", "fp32"),
    ],
)
def test_halves_of_recurrent_layers_are_predicted(name: str, precision: str) -> None:
    """Nothing that steps have kept goes. Gradients of all gates stay where the weight of what a
    layer reads joins; that of the state joins at each step, so all steps run backwards again."""
    assert _of_cells(name, precision, **HALVES) == pytest.approx(1, rel=0.01)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", ["rnn", "gru", "lstm", "projected lstm"])
def test_halves_of_few_samples_are_those_of_weights(name: str) -> None:
    if name == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU steps through such LSTMs")
    assert _of_cells(f"{name} of few samples", "bf16", 8, **HALVES) == pytest.approx(1, rel=0.01)


def test_what_recurrent_layers_make_is_there_beside_what_they_keep() -> None:
    """It has the name of the operator, as what that keeps inside has."""
    told = _of_cells("gru", "fp32", num_microbatches=4, schedule="one_f_one_b")
    assert told == pytest.approx(1, rel=0.01)


def test_gradients_of_layers_are_added_to_earlier_ones_one_by_one() -> None:
    told = _of_cells("rnn of few samples", "fp32", 8, num_microbatches=4, schedule="one_f_one_b")
    assert told == pytest.approx(1, rel=0.01)


class _Normed(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], *, sums: bool) -> None:
        super().__init__()
        self.sums = sums
        self.layers = nn.ModuleList(
            nn.Sequential(norm(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.sums else layer(x)
        return x.square().mean()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "weighted": lambda: nn.RMSNorm(64),
    "without a weight": lambda: nn.RMSNorm(64, elementwise_affine=False),
    "of layers": lambda: nn.LayerNorm(64),
}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("norm", NORMS)
def test_halves_of_norms_are_predicted(norm: str, precision: str, schedule: str) -> None:
    """By the root mean square they are operators one after the other, of which nothing goes. A
    gradient that is there is added to before they have most."""
    model, data = _Normed(NORMS[norm], sums=True), (torch.randn(2048, 64),)
    told = told_of_pipeline(model, data, precision, num_microbatches=4, schedule=schedule)
    assert told == pytest.approx([1, 1], rel=0.005)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_gradients_are_added_to_early_in_whole_backwards_too() -> None:
    model, data = _Normed(NORMS["without a weight"], sums=True), (torch.randn(2048, 64),)
    choice = {"num_microbatches": 4, "schedule": "one_f_one_b"}
    told = told_of_pipeline(model, data, "bf16-autocast", **choice)
    assert told == pytest.approx([1, 1], rel=0.005)


def _of_mixtral(precision: str, *pins: str, ranks: int = 2) -> list[float]:
    data = (torch.randint(0, 512, (8, 64)),)
    return told_of_pinned(
        Language(mixtral(512, 128, 128, 256, heads=8)), data, precision, *pins, ranks=ranks
    )


def test_gradients_of_gathered_weights_count_as_their_parts() -> None:
    """They are whole when an op has made them, and not before."""
    pins = ("ep=2", "samples=own", "place *.experts.* ep=S(0)", "num_microbatches=1")
    assert _of_mixtral("bf16", *pins) == pytest.approx([1, 1], rel=0.005)


def test_gradients_of_gathered_weights_are_scattered_one_by_one() -> None:
    """In a second half, which has most then, too."""
    pins = ("cp=2", "pp=2", "place *.experts.* cp=S(0)", "num_microbatches=4")
    told = _of_mixtral("bf16", *pins, "schedule=zero_bubble", ranks=4)
    assert told == pytest.approx([1] * 4, rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_first_halves_make_no_gradients_of_experts(precision: str) -> None:
    told = _of_mixtral(precision, "pp=2", "num_microbatches=4", "schedule=zero_bubble")
    assert told == pytest.approx([1, 1], rel=0.002)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize(
    "pins", [("samples=shared",), ("samples=own", "place *.experts.* ep=S(0)")]
)
def test_gradients_that_come_are_not_there_beside_sums_that_are(
    pins: tuple[str, ...], precision: str
) -> None:
    """Those of experts come as they are made, others go into sums that are there. Which rank has
    more rows is up to the router: of both together the sum is told, also where tokens travel."""
    told = _of_mixtral(precision, "ep=2", *pins, "num_microbatches=1")
    assert sum([1 / ratio for ratio in told]) / 2 == pytest.approx(1, rel=0.01)
