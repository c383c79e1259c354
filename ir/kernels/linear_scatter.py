"""A product whose summands go to the ranks that add them up, part by part as they are made.

`product` goes over the parts in order from the next rank's on, its own last, and writes each tile
into the memory of the rank that it is for, in a place of its own for each sender. The program that
finishes a part tells that rank. `sum_parts` there waits for all and adds them in order of ranks.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from meshwright.ir.kernels.gather_linear import (
    EDGE,
    processors,
    product_tile,
    tile,
    tile_of,
    wait,
    whole_row,
)
from meshwright.ir.launch import Build, element, jit, tl, triton

COLUMNS = 1024
"""Of a part, that a program adds up at once."""


def reference(xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The sum of all ranks' products of x [rows, k] with weight [n, k], all rows."""
    made = torch.stack([x @ w.T for x, w in zip(xs, weights, strict=True)]).sum(0)
    return made if bias is None else made + bias


@partial(jit, varying=("epoch",))
def product_kernel(
    x, weight, bias, slots, signals, done, epoch, rows, inner, ranks, own, n, k,
    along, down, BIASED: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`slots` and `signals`: addresses per rank, which 16 divides; `done`: zeros, to count tiles of
    each part."""
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(n, COLUMNS)
    for turn in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        rank = (own + 1 + turn // tiles) % ranks
        at = turn % tiles
        row = (at // tl.cdiv(n, COLUMNS)) * ROWS + tl.arange(0, ROWS)
        column = (at % tl.cdiv(n, COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
        left = x + tl.cast(whole_row(row, rank, ranks, inner), tl.int64)[:, None] * k
        total = product_tile(
            left, row, weight, bias, column, rows, n, k, along, down, BIASED, ROWS, COLUMNS, DEPTH
        )
        slot = tl.multiple_of(tl.load(slots + rank).to(tl.pointer_type(ELEMENT)), 16)
        to = (tl.cast(own, tl.int64) * rows + row[:, None]) * n + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(slot + to, total.to(ELEMENT), inside)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(done + rank, 1, sem="acq_rel", scope="gpu")
        if before == tiles - 1:
            signal = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + own
            tl.atomic_xchg(signal, epoch, sem="release", scope="sys")


@partial(jit, varying=("epoch",))
def sum_kernel(slot, signals, epoch, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        wait(signals + rank, epoch)
        total += tl.load(slot + tl.cast(rank, tl.int64) * count + at, at < count, 0.0).to(
            tl.float32
        )
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, signals: Tensor, epoch: int,
    inner: int, rank: int,
) -> None:  # fmt: skip
    """Of x, all rows of the whole value, with the rank's summands of the others."""
    ranks, (whole, k), n = len(slots), x.shape, len(weight)
    rows, done = whole // ranks, torch.zeros(ranks, dtype=torch.int32, device=x.device)
    tiles = ranks * triton.cdiv(rows, EDGE) * triton.cdiv(n, EDGE)
    product_kernel[(min(tiles, processors(x)),)](
        x, weight, weight if bias is None else bias, slots, signals, done, epoch, rows, inner,
        ranks, rank, n, k, *weight.stride(), BIASED=bias is not None, ELEMENT=element(x.dtype),
        **tile(x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip


def sum_parts(slot: Tensor, signals: Tensor, epoch: int) -> Tensor:
    """slot [ranks, rows, n], filled by the ranks that the signals are of -> [rows, n]."""
    out = torch.empty_like(slot[0])
    sum_kernel[(triton.cdiv(out.numel(), COLUMNS),)](
        slot, signals, epoch, out, out.numel(), RANKS=len(slot), BLOCK=COLUMNS
    )
    return out


def builds(name: str, width: int) -> Iterator[Build]:
    """For values of `name`, such as bf16, and 4 ranks."""
    pointer, kind = f"*{name}", {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    given = dict.fromkeys(("x", "weight", "bias"), pointer)
    given |= {"slots": "*i64", "signals": "*i64", "done": "*i32", "epoch": "i32"}
    given |= dict.fromkeys(("rows", "inner", "ranks", "own", "n", "k", "along"), "i32")
    values = dict.fromkeys(("rows", "inner", "n", "k"), width)
    plain = {**values, "along": width}
    constants = {"BIASED": True, "ELEMENT": kind, **tile_of(name)}
    yield Build(product_kernel, given, {"down": 1, **constants}, plain, warps=8)
    turned = {key: held for key, held in given.items() if key != "along"} | {"down": "i32"}
    constants |= {"BIASED": False}
    yield Build(product_kernel, turned, {"along": 1, **constants}, {**values, "down": width}, 8)
    last = {"slot": pointer, "signals": "*i32", "epoch": "i32", "out": pointer, "count": "i64"}
    moves, count = 5 * COLUMNS * kind.primitive_bitwidth // 8, {"count": 16 * width}
    yield Build(sum_kernel, last, {"RANKS": 4, "BLOCK": COLUMNS}, count, moves=moves)
