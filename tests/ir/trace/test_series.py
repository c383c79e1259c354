"""Models of time series, and what they do while they are traced: write into a cast that is none,
make a distribution, detach what has no gradient."""

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from tests.ir.trace.same_gradients import check_same


class Made(nn.Module):
    """Something computed of an input."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x * self.scale).square().mean()


def into_same(x: Tensor) -> Tensor:
    """A cast to what it is already is no copy: the write is seen through the other name."""
    same = x.to(torch.float64)
    same[:, 0] = 2 * x[:, 1]
    return x + same


def into_cast(x: Tensor) -> Tensor:
    """A cast is a copy: what it is of stays."""
    other = x.to(torch.float32)
    other[:, 0] = 3.0
    return x + other


def into_copy(x: Tensor) -> Tensor:
    other = x.to(torch.float64, copy=True)
    other[:, 0] = 3.0
    return x + other


def detached(x: Tensor) -> Tensor:
    places = torch.tensor([1, 2]).to("cpu").detach_()
    return x[:, places]


def of_distribution(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x.square() + 1).log_prob(torch.zeros(4).double())


@pytest.mark.parametrize("compute", [into_same, into_cast, into_copy, detached, of_distribution])
def test_equal_to_the_module(compute: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    checks = torch.distributions.Distribution._validate_args
    model, x = Made(compute).double(), torch.randn(3, 4, dtype=torch.float64)
    graph = trace(model, (x,))
    _check_equal(graph, model, (x,), model(x))
    assert torch.distributions.Distribution._validate_args == checks


def _check_equal(graph, model, batch, wanted: Tensor) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    made = interpret(graph, model, batch)[graph.loss]
    assert torch.allclose(made, wanted, rtol=1e-12)
    of_made = torch.autograd.grad(made, weights, allow_unused=True)
    of_wanted = torch.autograd.grad(wanted, weights, allow_unused=True)
    check_same(of_made, of_wanted)


def test_informer_has_no_mask_where_it_has_none_outside_of_a_trace() -> None:
    """Its encoder halves the sequence between layers, so that a mask would not fit."""
    torch.manual_seed(0)
    model = hf.InformerForPrediction(
        hf.InformerConfig(
            prediction_length=8, context_length=16, lags_sequence=[1, 2, 3], num_time_features=2,
            d_model=8, encoder_layers=2, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
            encoder_attention_heads=2, decoder_attention_heads=2, attention_type="full",
            encoder_layerdrop=0.0, decoder_layerdrop=0.0, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0,
        )
    ).double()  # fmt: skip
    batch = {
        "past_values": torch.randn(2, 19), "past_time_features": torch.randn(2, 19, 2),
        "past_observed_mask": torch.ones(2, 19), "future_values": torch.randn(2, 8),
        "future_time_features": torch.randn(2, 8, 2),
    }  # fmt: skip
    batch = {name: x.double() for name, x in batch.items()}
    _check_equal(trace(model, batch), model, batch, model(**batch).loss)


def test_timesfm_is_told_how_often_it_is_sampled() -> None:
    torch.manual_seed(0)
    model = hf.TimesFmModelForPrediction(
        hf.TimesFmConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            head_dim=8, patch_length=8, context_length=32, horizon_length=16,
        )
    ).double()  # fmt: skip
    batch = {
        "past_values": torch.randn(2, 32).double(), "future_values": torch.randn(2, 16).double(),
        "freq": torch.tensor([0, 1]),
    }  # fmt: skip
    _check_equal(trace(model, batch), model, batch, model(**batch).loss)
