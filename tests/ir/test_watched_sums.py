"""A backward that is watched adds up gradients where it would if nobody watched."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile

from meshwright.ir.torch_modes import watching


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.sin()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of two": lambda y: y.sin() + y.cos(),
    "of one that another has": lambda y: y + y.exp(),
    "of one twice": lambda y: y + y,
    "of two by one node": lambda y: y * y,
    "inside of a node": lambda y: torch.atan2(y, y + 1),
    "inside of a node, twice": lambda y: torch.logaddexp(y, y * 2),
    "spread": lambda y: y.sum() + y.sum(0) + y,
    "slices": lambda y: y[1:] * y[:-1],
    "of a user's function": lambda y: _Doubled.apply(y) + y.cos(),
    "similarity": lambda y: F.cosine_similarity(y, y.sin()),
    "attention": lambda y: F.scaled_dot_product_attention(*[y[None, None]] * 3),
}


def _sums(of: Callable[[Tensor], Tensor], mode: AbstractContextManager[Any]) -> list[str]:
    given = torch.rand(8, 8).requires_grad_()
    found = of(given * 1)
    above = torch.ones_like(found)  # somebody has it
    with profile() as seen, mode:
        torch.autograd.backward([found], [above])
    return [e.name for e in seen.events() if e.name in ("aten::add", "aten::add_")]


def test_sums_are_made_where_they_are_if_nobody_watches() -> None:
    every = []
    for name, of in SUMS.items():
        plain = _sums(of, nullcontext())
        # Each that is watched is there as autograd asks for it, and as it is done.
        assert _sums(of, watching(lambda made: None))[1::2] == plain, name
        every += plain
    assert {"aten::add", "aten::add_"} == set(every)
