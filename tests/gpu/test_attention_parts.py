"""Attention to keys part by part, as rings have it, is the whole one, forward and backward."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.attention.attend import (
    AttentionStats,
    PartialAttention,
    Visible,
    add_part,
    attend,
    attend_backward,
)
from tests.gpu.devices import DEVICES, on_each

BOUNDS = {"float64": 1e-12, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Of the largest value of the whole: results and gradients of parts are rounded each."""


@dataclass(frozen=True)
class Shape:
    """Queries that see `before` keys, and those up to their own place of as many more."""

    queries: int
    before: int
    heads: int
    groups: int
    width: int
    value_width: int


SHAPES = {
    "small": Shape(16, 24, 2, 2, 16, 16),
    "odd": Shape(37, 5, 6, 2, 20, 20),
    "latent": Shape(48, 64, 4, 4, 192, 128),
    "wide": Shape(33, 31, 2, 1, 264, 264),
    "real": Shape(512, 1024, 8, 2, 128, 128),
}
NAMES = [f"{shape} {dtype}" for shape in SHAPES for dtype in BOUNDS]


def _worst(name: str, device: str) -> list[float]:
    """How far result and gradients are from those of the whole in float64, each as a share of its
    largest value."""
    shape, dtype = SHAPES[name.split()[0]], getattr(torch, name.split()[1])
    torch.manual_seed(0)
    keys, shared = shape.before + shape.queries, shape.heads // shape.groups
    sizes = (
        (2, shape.groups, shared, shape.queries, shape.width), (2, shape.groups, keys, shape.width),
        (2, shape.groups, keys, shape.value_width),
        (2, shape.groups, shared, shape.queries, shape.value_width),
    )  # fmt: skip
    given = [torch.randn(size, device="cpu").to(device, dtype) for size in sizes]
    query, key, value, grad = given
    scale = shape.width**-0.5
    pieces = [
        (slice(0, shape.before), Visible(scale)),
        (slice(shape.before, keys), Visible(scale, first=0)),
    ]
    parts = [attend(query, key[..., at, :], value[..., at, :], seen) for at, seen in pieces]
    both = PartialAttention(*(x.clone() for x in parts[0]))
    add_part(both, parts[1])
    out = both.out.to(dtype)
    known = AttentionStats(out, both.total, grad)
    found = [
        attend_backward(query, key[..., at, :], value[..., at, :], seen, known, False)
        for at, seen in pieces
    ]
    made = [
        out, sum(one.query for one in found), torch.cat([one.key for one in found], -2),
        torch.cat([one.value for one in found], -2),
    ]  # fmt: skip

    whole = [x.detach().to("cpu", torch.float64).requires_grad_() for x in given[:3]]
    mask = torch.ones(shape.queries, keys, dtype=torch.bool, device="cpu").tril(shape.before)
    copies = [x.repeat_interleave(shared, 1) for x in whole[1:]]
    expected = scaled_dot_product_attention(whole[0].flatten(1, 2), *copies, mask, scale=scale)
    expected = expected.view(sizes[3])
    expected.backward(grad.to("cpu", torch.float64))
    wanted = [expected.detach(), *(x.grad for x in whole)]
    return [
        float((a.to("cpu", torch.float64) - b).abs().max() / b.abs().max())
        for a, b in zip(made, wanted, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_the_whole(device: str) -> None:
    for name, errors in on_each(device, _worst, NAMES).items():
        assert len(errors) == 4 and max(errors) <= BOUNDS[name.split()[1]], (name, errors)
