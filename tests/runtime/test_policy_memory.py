"""Memory under stores, forms and precisions that share little with each other: predicted beside
tracked bytes. Few samples, so that parameters, gradients and what moves them have most."""

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from tests.small_languages import Language, gpt2, llama
from tests.told_memory import told_of_pinned

F = nn.functional
WORDS = 512
HALVES = ("pp=2", "num_microbatches=4", "schedule=zero_bubble")
ONE_AFTER_ONE = ("pp=2", "num_microbatches=4", "schedule=one_f_one_b")


class _Layers(nn.Module):
    """Six of 256, each with a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))
        self.out = nn.Linear(256, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.out(x), y)


class _Cells(nn.Module):
    """Two LSTMs that read samples before steps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.one = nn.LSTM(64, 128, batch_first=True)
        self.two = nn.LSTM(128, 128, batch_first=True)
        self.out = nn.Linear(128, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.two(self.one(self.words(ids))[0])[0]
        return F.cross_entropy(self.out(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _ids(samples: int, tokens: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, WORDS, (samples, tokens)),)


def _rows(samples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return torch.randn(samples, 256, dtype=dtype), torch.randn(samples, 8, dtype=dtype)


def _llama(hidden: int = 344) -> nn.Module:
    return llama(WORDS, 128, 128, hidden, heads=8)


@pytest.mark.parametrize("store", ["on_host", "sums_on_host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_summed_over_a_model_axis_stay_to_the_end(
    store: str, precision: str
) -> None:
    pins = ("tp=2", "num_microbatches=2", f"store={store}")
    told = told_of_pinned(Language(_llama()), _ids(8, 128), precision, *pins)
    assert told == pytest.approx([1, 1], rel=0.001)


def test_gradients_of_a_weight_that_two_stages_read_stay_to_the_end() -> None:
    """Those of other weights of a stage come and go meanwhile."""
    model = gpt2(WORDS, 128, 128, heads=8)
    told = told_of_pinned(Language(model), _ids(8, 128), "fp32", *ONE_AFTER_ONE, "store=on_host")
    assert told == pytest.approx([1, 1], rel=0.001)


def test_bases_of_kfac_are_there_once() -> None:
    """Those that a rank sends come back with the others'; the largest rank is told."""
    pins = ("sync=kfac", "zero=0", "dp_replicate=2", "num_microbatches=1")
    told = told_of_pinned(_Layers(), _rows(16), "fp32", *pins, allow=("second_order",))
    assert min(told) == pytest.approx(1, rel=0.005)


def test_an_average_that_is_taken_in_needs_no_room() -> None:
    """It arrives in the step that is tracked."""
    pins = ("sync=dasgd", "zero=0", "dp_replicate=2", "num_microbatches=1")
    told = told_of_pinned(_Layers(), _rows(16), "fp32", *pins, allow=("delayed",), steps=5)
    assert told == pytest.approx([1, 1], rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_blocks_that_train_nothing_let_go_with_first_halves(precision: str) -> None:
    """A second half that is a whole backward begins with the gradient that its block is given."""
    model = mw.adapt(_llama(384), "lora", skip="lm_head")
    told = told_of_pinned(Language(model), _ids(8, 128), precision, *HALVES)
    assert told == pytest.approx([1, 1], rel=0.003)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pins", [("dp_replicate=2", "num_microbatches=1"), ONE_AFTER_ONE])
def test_results_of_lstms_lie_turned(precision: str, pins: tuple[str, ...]) -> None:
    """The next one makes no copy, but where they have come in a message, which is a copy, too."""
    told = told_of_pinned(_Cells(), _ids(16, 32), precision, *pins)
    assert told == pytest.approx([1, 1], rel=0.005)


def test_what_is_summed_goes_while_its_sum_is_on_its_way() -> None:
    told = told_of_pinned(_Layers(), _rows(256), "fp32", "tp=2", "num_microbatches=1")
    assert told == pytest.approx([1, 1], rel=0.005)


@pytest.mark.parametrize("model", [_Layers, _Cells])
def test_narrow_values_of_autocast_travel_so(model: type[nn.Module]) -> None:
    data = _rows(256) if model is _Layers else _ids(16, 32)
    told = told_of_pinned(model(), data, "bf16-autocast", *ONE_AFTER_ONE)
    assert told == pytest.approx([1, 1], rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_second_halves_free_what_they_read_and_cast_what_they_make(precision: str) -> None:
    told = told_of_pinned(_Layers(), _rows(256), precision, *HALVES)
    assert told == pytest.approx([1, 1], rel=0.001)


def test_the_gradient_of_what_a_block_reads_is_there_when_others_go() -> None:
    pins = ("dp_shard=2", "zero=1", "num_microbatches=1")
    told = told_of_pinned(_Layers().double(), _rows(256, torch.float64), "fp64", *pins)
    assert told == pytest.approx([1, 1], rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_a_gradient_that_has_come_lies_before_those_that_its_block_makes(precision: str) -> None:
    pins = ("pp=2", "num_microbatches=1", "schedule=one_f_one_b")
    told = told_of_pinned(Language(_llama()), _ids(8, 16), precision, *pins)
    assert told == pytest.approx([1, 1], rel=0.001)


def test_parameters_of_first_blocks_begin_to_come_together() -> None:
    """Beside gradients, which are there until the next step begins."""
    pins = ("dp_shard=2", "zero=1", "sync=dear", "num_microbatches=1")
    model, data = Language(_llama()).double(), _ids(8, 16)
    told = told_of_pinned(model, data, "fp64", *pins)
    assert told == pytest.approx([1, 1], rel=0.001)
