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
    both_ways,
    how,
    product_tile,
    programs,
    shapes,
    wait,
    weight_read,
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
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """`slots` and `signals`: addresses per rank, which 16 divides; `done`: zeros, to count tiles of
    each part."""
    weight = weight_read(weight, n, k, along, down, COLUMNS, DEPTH, READ)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(n, COLUMNS)
    for turn in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        rank = (own + 1 + turn // tiles) % ranks
        at = turn % tiles
        row = (at // tl.cdiv(n, COLUMNS)) * ROWS + tl.arange(0, ROWS)
        side = (at % tl.cdiv(n, COLUMNS)) * COLUMNS
        column = side + tl.arange(0, COLUMNS)
        left = x + tl.cast(whole_row(row, rank, ranks, inner), tl.int64)[:, None] * k
        total = product_tile(
            left, row, weight, bias, side, rows, n, k, along, down,
            BIASED, ROWS, COLUMNS, DEPTH, READ,
        )  # fmt: skip
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
    bias_or, launch = weight if bias is None else bias, how(weight)
    product_kernel[(programs(launch, rows, ranks, weight),)](
        x, weight, bias_or, slots, signals, done, epoch, rows, inner, ranks, rank, n, k,
        *weight.stride(), BIASED=bias is not None, ELEMENT=element(x.dtype), **launch,
    )  # fmt: skip


def sum_parts(slot: Tensor, signals: Tensor, epoch: int) -> Tensor:
    """slot [ranks, rows, n], filled by the ranks that the signals are of -> [rows, n]."""
    out = torch.empty_like(slot[0])
    sum_kernel[(triton.cdiv(out.numel(), COLUMNS),)](
        slot, signals, epoch, out, out.numel(), RANKS=len(slot), BLOCK=COLUMNS
    )
    return out


def signature(name: str) -> dict[str, str]:
    """Types of the product's parameters but for the weight's strides."""
    given = dict.fromkeys(("x", "weight", "bias"), f"*{name}")
    given |= {"slots": "*i64", "signals": "*i64", "done": "*i32", "epoch": "i32"}
    return given | dict.fromkeys(("rows", "inner", "ranks", "own", "n", "k"), "i32")


def builds(name: str, width: int) -> Iterator[Build]:
    """For values of `name`, such as bf16, and 4 ranks."""
    kind = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    for shape in shapes(name, width):
        constants = {"BIASED": True, "ELEMENT": kind}
        yield from both_ways(product_kernel, signature(name), constants, width, *shape)
    pointer = f"*{name}"
    last = {"slot": pointer, "signals": "*i32", "epoch": "i32", "out": pointer, "count": "i64"}
    moves, count = 5 * COLUMNS * kind.primitive_bitwidth // 8, {"count": 16 * width}
    yield Build(sum_kernel, last, {"RANKS": 4, "BLOCK": COLUMNS}, count, moves=moves)
