"""Odd models by what they take and give back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.attack.odd_nets import Net


class KeywordOnly(Net):
    def forward(self, *, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(x * scale, y)


class Star(Net):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(args[0], args[1])


class Given(NamedTuple):
    loss: Tensor
    more: int


class Returns(Net):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.made(super().forward(x, y))


class Scaled(Net):
    """Takes a scalar input beside the batch."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x * scale, y)


class Optional_(Net):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask, y)


class Inside(Net):
    """Reads what is inside an item of the batch."""

    def forward(self, x: Any, y: Tensor) -> Any:
        return super().forward(x["inner"][1], y)
