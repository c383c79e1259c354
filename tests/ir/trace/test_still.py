"""Random operators that give constants."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.ir.trace.still import Still, Unsettled

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.mark.parametrize(
    ("draw", "wanted"),
    [
        (lambda: F.dropout(X, 0.5), X * 2),
        (lambda: F.dropout1d(X[None], 0.5)[0], X * 2),
        (lambda: torch.native_dropout(X, 0.5, True)[0], X * 2),
        (lambda: torch.bernoulli(torch.full((4,), 0.3)), torch.ones(4)),
        (lambda: torch.rand(4), torch.full((4,), 0.25)),
        (lambda: torch.bernoulli(torch.tensor([0.2, 0.3])), torch.tensor([0.0, 1.0])),
        (lambda: torch.randn_like(X), torch.full_like(X, 0.5)),
        (lambda: torch.empty(4).normal_(1.0, 2.0), torch.full((4,), 2.0)),
        (lambda: torch.empty(4).uniform_(2.0, 4.0), torch.full((4,), 2.5)),
        (lambda: torch.randint(3, 9, (4,)), torch.full((4,), 4)),
        (lambda: torch.randperm(4), torch.arange(4)),
    ],
)
def test_draws_are_constants(draw, wanted):
    with Still():
        found = draw()
    torch.testing.assert_close(found, wanted)


def test_what_draws_nothing_runs_and_what_has_no_constant_is_named():
    query = X.view(1, 1, 4, 8)
    with Still():
        plain: Tensor = F.scaled_dot_product_attention(query, query, query)
        scaled = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        with pytest.raises(Unsettled, match="rrelu_with_noise"):
            F.rrelu(X, training=True)
    torch.testing.assert_close(scaled, plain * 2)
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(query, query, query))
