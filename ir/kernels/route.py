"""Rows that go to one or several ranks, and what comes home of each, summed: experts' tokens.

`places` [ranks, tokens] says where among the rows in order of ranks a token's row for each rank
lies, -1 where it has none. Going out is a gather, coming home a sum in order of ranks, in float32,
without atomic additions: the same bits every time. Each is the other's gradient.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.launch import Build, held_dtype, jit, tl, triton, way, wide

COLUMNS = 1024
"""Of a row, that a program holds at once."""


def places_of(owned: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of all rows and the places of all tokens, from whether a rank [ranks, tokens] has
    something to do with a token."""
    flat = owned.reshape(-1)
    places = torch.where(flat, flat.cumsum(0) - 1, -1).view(owned.shape)
    return owned.nonzero()[:, 1].contiguous(), places


def out_reference(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Rows of x [tokens, ...] in order of the rank that they go to."""
    return x.index_select(0, tokens)


def home_reference(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Per token the sum of its rows."""
    apply: Callable[..., Tensor] = _Home.apply
    return apply(rows, tokens, places.shape[1])


class _Home(torch.autograd.Function):
    """Keeps no rows: torch's own sum keeps them for their shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(tokens)
        held = rows.to(held_dtype(rows.dtype))
        summed = held.new_zeros(count, *rows.shape[1:]).index_add_(0, tokens, held)
        return summed.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None


@jit
def out_kernel(x, tokens, rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.load(tokens + row) * width + at, at < width, 0.0)
    tl.store(rows + row * width + at, value, at < width)


@jit
def home_kernel(rows, places, out, ranks, count, width, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.zeros([BLOCK], WIDE)
    for rank in range(ranks):
        place = tl.load(places + tl.cast(rank, tl.int64) * count + token)
        limit = tl.where(place < 0, 0, width)
        summed += tl.load(rows + place * width + at, at < limit, 0.0).to(WIDE)
    tl.store(out + token * width + at, summed.to(out.dtype.element_ty), at < width)


def _width(x: Tensor) -> int:
    return x[0].numel() if len(x) else 0


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """Programs, and the columns that each has."""
    columns = min(COLUMNS, int(triton.next_power_of_2(width)))
    return (rows, int(triton.cdiv(width, columns))), columns


@custom_op("meshwright::route_out", mutates_args=())
def route_out(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """As `out_reference`."""
    x, width = x.contiguous(), _width(x)
    if not len(tokens) or way("route", x) == "torch":
        return out_reference(x, tokens, places)
    rows = x.new_empty(len(tokens), *x.shape[1:])
    grid, columns = _grid(len(tokens), width)
    out_kernel[grid](x, tokens.contiguous(), rows, width, BLOCK=columns)
    return rows


@custom_op("meshwright::route_home", mutates_args=())
def route_home(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """As `home_reference`."""
    rows, width = rows.contiguous(), _width(rows)
    if way("route", rows) == "torch":
        return home_reference(rows, tokens, places)
    (ranks, count), out = places.shape, rows.new_empty(places.shape[1], *rows.shape[1:])
    grid, columns = _grid(count, width)
    home_kernel[grid](
        rows, places.contiguous(), out, ranks, count, width, BLOCK=columns, WIDE=wide(rows.dtype)
    )
    return out


@route_out.register_fake
def _out_shape(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(len(tokens), *x.shape[1:])


@route_home.register_fake
def _home_shape(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(places.shape[1], *rows.shape[1:])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:])


def _out_back(ctx, grad):
    return route_home(grad, *ctx.saved_tensors), None, None


def _home_back(ctx, grad):
    return route_out(grad, *ctx.saved_tensors), None, None


route_out.register_autograd(_out_back, setup_context=_save)
route_home.register_autograd(_home_back, setup_context=_save)

OPERATORS = {"route_out": (route_out, out_reference), "route_home": (route_home, home_reference)}


def builds(element: str, width: int) -> Iterator[Build]:
    """For rows of `element`, such as bf16."""
    columns, nbytes = _grid(1, width)[1], 4 if element == "fp32" else 2
    pointer, constants = f"*{element}", {"BLOCK": columns}
    filled = width / (triton.cdiv(width, columns) * columns)
    shape: dict[str, Any] = {"values": {"width": width}, "filled": filled}
    once = columns * nbytes * filled
    rows = {"x": pointer, "tokens": "*i64", "rows": pointer, "width": "i32"}
    yield Build(out_kernel, rows, constants, moves=2 * once, **shape)
    sizes = dict.fromkeys(("ranks", "count", "width"), "i32")
    home = {"rows": pointer, "places": "*i64", "out": pointer, **sizes}
    yield Build(
        home_kernel, home, {**constants, "WIDE": tl.float32}, moves=once, looped=True, **shape
    )
