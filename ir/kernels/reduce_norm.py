"""The sum of the peers' summands, a residual added to it, and its norm, read from their memory.

In one shot each rank reads all summands: least latency, for little data. In two shots each rank
sums its rows for all (`sum_rows`), and then reads every row from the rank that has its sum: fewer
bytes. Peers' memory is a table of addresses that 16 divides, so anything a process can read may
stand for it.
Sums are taken in order of ranks and rounded once, so all ranks and both ways have the same bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.ir.kernels import layer_norm, rms_norm
from meshwright.ir.launch import Build, block, element, held_dtype, jit, tl, triton, warps, wide

COLUMNS = 1024
"""Of a row, that a program sums at once."""
Rows = tuple[Tensor, ...]
"""(sum, its norm, what the norm's backward needs per row)."""


def reference(
    summands: Sequence[Tensor], residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The whole sum and its norm: LayerNorm with a bias, RMSNorm without."""
    summed = torch.stack(list(summands)).sum(0)
    if bias is None:
        return rms_norm.added_reference(summed, residual, gain, eps)
    return layer_norm.reference(summed, residual, gain, bias, eps)


@jit
def _of_rank(peers, rank, ELEMENT: tl.constexpr):
    """Where a rank's summands begin: 16 divides the address."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(ELEMENT)), 16)


@jit
def sum_kernel(
    peers, own, first, width, RANKS: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = (first + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for rank in tl.static_range(RANKS):
        source = _of_rank(peers, rank, ELEMENT)
        total += tl.load(source + row * width + at, at < width, 0.0).to(WIDE)
    tl.store(own + row * width + at, total.to(ELEMENT), at < width)


@jit
def norm_kernel(
    peers, residual, gain, bias, total, out, mean, inverse, width, eps, per_rank,
    RANKS: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """With `per_rank` rows to each rank a row is read from its rank; with 0 it is summed here."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    if RANKS == 0:
        source = _of_rank(peers, row // per_rank, ELEMENT)
        held = tl.load(source + here, inside, 0.0).to(WIDE)
    else:
        held = tl.zeros([BLOCK], WIDE)
        for rank in tl.static_range(RANKS):
            source = _of_rank(peers, rank, ELEMENT)
            held += tl.load(source + here, inside, 0.0).to(WIDE)
        held = held.to(ELEMENT).to(WIDE)
    held += tl.load(residual + here, inside, 0.0).to(WIDE)
    rounded = held.to(total.dtype.element_ty)
    tl.store(total + here, rounded, inside)
    held = rounded.to(WIDE)
    if CENTRED:
        middle = tl.sum(held, 0) / width
        tl.store(mean + row, middle)
        held = tl.where(inside, held - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(held * held, 0) / width + eps)
    tl.store(inverse + row, scale)
    made = held * scale * tl.load(gain + at, inside, 0.0).to(WIDE)
    if CENTRED:
        made += tl.load(bias + at, inside, 0.0).to(WIDE)
    tl.store(out + here, made.to(out.dtype.element_ty), inside)


def rows_of(rank: int, rows: int, ranks: int) -> tuple[int, int]:
    """The first row that a rank sums for all, and how many."""
    per_rank = -(-rows // ranks)
    first = min(rank * per_rank, rows)
    return first, min(per_rank, rows - first)


def sum_rows(peers: Tensor, own: Tensor, rank: int) -> None:
    """Before two shots: in `own`, what the rank has of the summands [rows, width] in memory that
    peers see, its rows become the sums of all."""
    first, count = rows_of(rank, len(own), len(peers))
    width = own.shape[1]
    columns = min(COLUMNS, block(width))
    if count:
        sum_kernel[(count, triton.cdiv(width, columns))](
            peers, own, first, width, RANKS=len(peers), ELEMENT=element(own.dtype), BLOCK=columns,
            WIDE=wide(own.dtype),
        )  # fmt: skip


def norm_rows(
    peers: Tensor, summand: torch.dtype, residual: Tensor, gain: Tensor, bias: Tensor | None,
    eps: float, *, one_shot: bool,
) -> Rows:  # fmt: skip
    """The sum with the residual, its norm, and per row what `add_rms_norm`, or with a bias
    `add_layer_norm`, keeps for the backward."""
    residual, width = residual.contiguous(), residual.shape[-1]
    rows, ranks = residual.numel() // width, len(peers)
    dtype = torch.promote_types(summand, residual.dtype)
    total = torch.empty_like(residual, dtype=dtype)
    out = torch.empty_like(residual, dtype=torch.promote_types(dtype, gain.dtype))
    mean, inverse = (
        residual.new_empty(residual.shape[:-1], dtype=held_dtype(dtype)) for _ in range(2)
    )
    norm_kernel[(rows,)](
        peers, residual, gain, gain if bias is None else bias, total, out, mean, inverse, width,
        eps, -(-rows // ranks), RANKS=ranks if one_shot else 0, ELEMENT=element(summand),
        BLOCK=block(width), WIDE=wide(dtype), CENTRED=bias is not None, num_warps=warps(width),
    )  # fmt: skip
    return (total, out, inverse) if bias is None else (total, out, mean, inverse)


def builds(name: str, width: int) -> Iterator[Build]:
    """For summands of `name`, such as bf16, of 4 ranks."""
    pointer, kind = f"*{name}", {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    nbytes, columns, ranks = kind.primitive_bitwidth // 8, min(COLUMNS, block(width)), 4
    sizes = {"ELEMENT": kind, "BLOCK": columns, "WIDE": tl.float32}
    given = {"peers": "*i64", "own": pointer, "first": "i32", "width": "i32"}
    filled, values = width / (triton.cdiv(width, columns) * columns), {"width": width}
    moves = (ranks + 1) * columns * filled * nbytes
    yield Build(sum_kernel, given, {"RANKS": ranks, **sizes}, values, moves=moves, filled=filled)
    tensors = dict.fromkeys(("residual", "gain", "bias", "total", "out"), pointer)
    rows = {"mean": "*fp32", "inverse": "*fp32", "width": "i32", "eps": "fp32", "per_rank": "i32"}
    sizes["BLOCK"], filled = block(width), width / block(width)
    for centred in (False, True):
        for shots in (0, ranks):
            constants = {"RANKS": shots, **sizes, "CENTRED": centred}
            moves, cached = (max(shots, 1) + 3) * width * nbytes, (1 + centred) * width * nbytes
            yield Build(
                norm_kernel, {"peers": "*i64", **tensors, **rows}, constants, values, warps(width),
                moves=moves, cached=cached, filled=filled,
            )  # fmt: skip
