"""Memory of a step whose most is inside one operator's backward: predicted beside tracked bytes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.told_memory import told_of_held

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: ((y - 1) ** 2).mean(),
    "erf": lambda y: y.erf().mean(),
    "quotient": lambda y: (y / (y * y + 1)).mean(),
    "quotient of rows": lambda y: (y / (y.abs().sum(-1, keepdim=True) + 1)).mean(),
    "product with means": lambda y: (y * y.mean(-1, keepdim=True)).mean(),
    "one column": lambda y: y.log_softmax(-1)[..., 0].mean(),
    "neighbours": lambda y: (y[:, :-1] * y[:, 1:]).mean(),
    "halves": lambda y: (nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]).mean(),
    "rows of a list": lambda y: y[torch.arange(0, 512, 2)].mean(),
    "clamp": lambda y: y.clamp(-1, 1).mean(),
    "squares of rows": lambda y: nn.functional.layer_norm(y, (256,)).pow(2).mean(),
    "unit rows": lambda y: nn.functional.normalize(y, dim=-1)[..., 0].mean(),
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


def test_buffers_that_nothing_but_a_prelude_reads_are_there() -> None:
    _check(_Reads())


def _check(model: nn.Module) -> None:
    told = told_of_held(model, (torch.randn(512, 64),), "fp32")
    assert told == pytest.approx(1.0, abs=0.01)
