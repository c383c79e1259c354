"""A product of what the ranks hold together, begun with the part that is there.

`product` goes over the parts in order from the rank's own on. A part is read once its signal says
that it has come; who brings it (copy engines, from the peers' memory) sets the signal. One program
per processor takes tile after tile.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.ir.launch import Build, held_dtype, jit, tl, triton
from meshwright.ir.placed import peers

EDGE = 128
"""Rows and columns that a program makes at a time."""
DEPTHS = {2: 64, 4: 16}
"""Of each operand's rows, that it holds at a time, by bytes of a value: three such steps fit into
shared memory; with 32 values of four bytes registers are spilled."""
DTYPES = tuple(getattr(torch, name) for name in peers.DTYPES)


def reference(parts: Tensor, weight: Tensor, bias: Tensor | None, inner: int) -> Tensor:
    """parts [ranks, outer x inner, k], weight [n, k], bias [n] -> [outer x ranks x inner, n]."""
    return torch.nn.functional.linear(in_order(parts, inner), weight, bias)


def in_order(parts: Tensor, inner: int) -> Tensor:
    """The parts of all ranks as the whole value has its rows: those of a rank lie in runs."""
    ranks, rows, width = parts.shape
    return parts.view(ranks, rows // inner, inner, width).transpose(0, 1).reshape(-1, width)


@jit
def wait(signal, epoch):
    """Until what the signal speaks of has come. What is read after it was written before it."""
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < epoch:
        pass


@jit
def whole_row(row, rank, ranks, inner):
    """Which row of the whole value a row of a rank's part is."""
    return (row // inner) * (ranks * inner) + rank * inner + row % inner


@jit
def product_tile(
    left, row, weight, bias, column, rows, n, k, along, down,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The sums of products of rows that `left` points to with rows of the weight [n, k], which lie
    so far apart, and their elements."""
    right = weight + tl.cast(column[None, :], tl.int64) * along
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        deep = start + tl.arange(0, DEPTH)
        a = tl.load(left + deep[None, :], (row[:, None] < rows) & (deep[None, :] < k), 0.0)
        deeper = tl.cast(deep[:, None], tl.int64) * down
        b = tl.load(right + deeper, (column[None, :] < n) & (deep[:, None] < k), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, column < n, 0.0).to(tl.float32)[None, :]
    return total


@jit
def product_kernel(
    parts, signals, epoch, weight, bias, out, rows, inner, ranks, first, n, k,
    along, down, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(n, COLUMNS)
    for turn in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        rank = (first + turn // tiles) % ranks
        wait(signals + rank, epoch)
        at = turn % tiles
        row = (at // tl.cdiv(n, COLUMNS)) * ROWS + tl.arange(0, ROWS)
        column = (at % tl.cdiv(n, COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
        left = parts + (tl.cast(rank, tl.int64) * rows + row[:, None]) * k
        total = product_tile(
            left, row, weight, bias, column, rows, n, k, along, down, BIASED, ROWS, COLUMNS, DEPTH
        )
        to = tl.cast(whole_row(row, rank, ranks, inner), tl.int64)[:, None] * n + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(out + to, total.to(out.dtype.element_ty), inside)


def product(
    parts: Tensor, signals: Tensor, epoch: int, weight: Tensor, bias: Tensor | None, inner: int,
    rank: int,
) -> Tensor:  # fmt: skip
    """As `reference`, while parts still come."""
    ranks, rows, k = parts.shape
    n = len(weight)
    out = parts.new_empty(ranks * rows, n)
    tiles = ranks * triton.cdiv(rows, EDGE) * triton.cdiv(n, EDGE)
    product_kernel[(min(tiles, processors(parts)),)](
        parts, signals, epoch, weight, weight if bias is None else bias, out, rows, inner, ranks,
        rank, n, k, *weight.stride(), BIASED=bias is not None, **tile(parts.element_size()),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def tile(itemsize: int) -> dict[str, int]:
    """Sizes of what a program holds."""
    return {"ROWS": EDGE, "COLUMNS": EDGE, "DEPTH": DEPTHS[itemsize]}


def tile_of(element: str) -> dict[str, int]:
    """The same for values of `element`, such as bf16."""
    return tile(4 if element == "fp32" else 2)


def processors(x: Tensor) -> int:
    """Programs that run at once; few where it is the interpreter."""
    if not x.is_cuda:
        return 2
    found: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return found


assert all(held_dtype(dtype) is torch.float32 for dtype in DTYPES)


def builds(name: str, width: int) -> Iterator[Build]:
    """For values of `name`, such as bf16."""
    pointer = f"*{name}"
    given = {"parts": pointer, "signals": "*i32", "epoch": "i32"}
    given |= dict.fromkeys(("weight", "bias", "out"), pointer)
    given |= dict.fromkeys(("rows", "inner", "ranks", "first", "n", "k", "along"), "i32")
    values = dict.fromkeys(("rows", "inner", "n", "k"), width)
    plain, constants = {**values, "along": width}, {"BIASED": True, **tile_of(name)}
    yield Build(product_kernel, given, {"down": 1, **constants}, plain, warps=8)
    turned = {key: kind for key, kind in given.items() if key != "along"} | {"down": "i32"}
    yield Build(product_kernel, turned, {"along": 1, **constants}, {**values, "down": width}, 8)
