"""Cases of dropout, alone and after GELU, and how far kernels are from what is written out."""

import json
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from meshwright.ir import launch
from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout
from meshwright.ir.random.dropout import dropout
from meshwright.ir.random.philox import kept_scale, least_kept, numbers
from meshwright.ir.random.strided import filled, span

PLACES: list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = [
    ((3, 2, 37), 0, (-1,), (1,)),
    ((3, 2, 37), 7, (-1,), (1,)),
    ((4, 64), 32, (-1, 64), (128, 1)),
    ((4, 3, 64), 64, (-1, 3, 64), (1536, 128, 1)),
    ((4, 6), 6, (-1, 6), (12, 1)),
    ((6, 1100), 0, (-1,), (1,)),
    ((2, 6, 5), 0, (2, -1, 10), (10, 20, 1)),
    ((3, 8), 5, (3, 2, -1), (2, 1, 6)),
    ((2, 2, 2, 2, 2), 3, (2, 2, 2, 2, -1), (160, 70, 30, 10, 1)),
    ((0, 8), 0, (-1,), (1,)),
]
"""Shape, first number, sizes and strides: in order, parts of samples, samples along rows, and more
dims than kernels count through."""
P, KEY = 0.25, (1 << 62) + 12345


def kept(index: int) -> Tensor:
    """Written out: what elements are multiplied by, in float64."""
    shape, first, sizes, strides = PLACES[index]
    if not prod(shape):
        return torch.zeros(shape, dtype=torch.float64)
    dims = filled(sizes, prod(shape))
    place = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(dims, strides, strict=True):
        place = place.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    drawn = numbers(KEY, first, span(dims, strides))[place.reshape(shape)]
    made = (drawn >= least_kept(P)).double() * kept_scale(P)
    return made.to(torch.get_default_device())


def case(index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    shape, *where = PLACES[index]
    generator = torch.Generator("cpu").manual_seed(index)
    here = torch.get_default_device()
    x, bias = (
        torch.randn(s, generator=generator, device="cpu").to(here, dtype)
        for s in (shape, shape[-1:])
    )
    return x.requires_grad_(), bias.requires_grad_(), (P, KEY, *where)


def held(where: tuple[Any, ...], each: int) -> tuple[Any, ...]:
    """The same numbers, of a key and a first place that a tensor has; a sample has `each`."""
    p, key, first, *dims = where
    return p, 0, first - 2 * each, *dims, torch.tensor([key, 2 * each]), each


def errors(index: int, dtype: torch.dtype = torch.float64, each: int = 0) -> list[float]:
    """Of both ops' results and gradients, from what is written out; with `each`, `held` so."""
    x, bias, where = case(index, dtype)
    where = held(where, each) if each else where
    weight = torch.linspace(-1, 1, max(x.numel(), 1), dtype=dtype)[: x.numel()].view(x.shape)
    found = []
    for made, right in (
        (dropout(x, *where), x * kept(index).to(dtype)),
        (
            gelu_dropout(x, bias, True, *where),
            gelu(x + bias, approximate="tanh") * kept(index).to(dtype),
        ),
    ):
        leaves = (x, bias) if made.grad_fn and len(found) else (x,)
        grads, wanted = (torch.autograd.grad((y * weight).sum(), leaves) for y in (made, right))
        for one, other in zip((made, *grads), (right, *wanted), strict=True):
            found.append((one - other).abs().max().item() if one.numel() else 0.0)
    return found


def under() -> dict[str, Any]:
    return {
        "way": launch.way("test", torch.zeros(1)),
        "errors": [errors(index, each=each) for index in range(len(PLACES)) for each in (0, 16, 5)],
        "taken": [*launch.TAKEN],
    }


if __name__ == "__main__":
    print(json.dumps(under()))
