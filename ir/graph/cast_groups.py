"""Kernels that cast operands of grouped products to 8-bit floats: a row or a column is read for its
largest value, read again and written, turned where the product wants it so.

Torch's own operators would move four times the bytes, more than 8-bit products save.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.ir.graph.float8 import MULTIPLE
from meshwright.ir.launch import jit, tl, triton

NARROW = torch.float8_e4m3fn
LARGEST = torch.finfo(NARROW).max
LEAST = 1e-12
"""What values of an operand that is all zeros are taken to be at most."""
POWERS = -(1 << 23)
"""The bits of a float32 that are its sign and exponent."""
_WIDE = 1024
_TALL, _ACROSS = 128, 32
"""Rows and columns of a block that is turned."""


def _find_scale(most: Any, largest: tl.constexpr, least: tl.constexpr, powers: tl.constexpr):  # type: ignore[no-untyped-def]
    found = tl.div_rn(largest, tl.maximum(most, least, propagate_nan=tl.PropagateNan.ALL))
    return (found.to(tl.int32, bitcast=True) & powers).to(tl.float32, bitcast=True)


def _rows_kernel(  # type: ignore[no-untyped-def]
    x, out, back, given, columns, stride, pitch, apart,
    largest: tl.constexpr, least: tl.constexpr, powers: tl.constexpr,
    by_row: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, wide)
    if by_row:
        most = tl.zeros((wide,), tl.float32)
        for start in range(0, columns, wide):
            part = tl.load(x + row * stride + start + at, start + at < columns, 0.0)
            most = tl.maximum(most, tl.abs(part.to(tl.float32)),
                              propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        scale = _scale(tl.max(most, 0), largest, least, powers)
    else:
        scale = tl.load(given + row)
    tl.store(back + row * apart, tl.div_rn(1.0, scale))
    for start in range(0, columns, wide):
        seen = start + at < columns
        part = tl.load(x + row * stride + start + at, seen, 0.0).to(tl.float32)
        tl.store(out + row * pitch + start + at, (part * scale).to(tl.float8e4nv), seen)


def _widen_kernel(  # type: ignore[no-untyped-def]
    x, back, out, columns, pitch, apart, wide: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * wide + tl.arange(0, wide)
    seen = at < columns
    part = tl.load(x + row * pitch + at, seen, 0.0).to(tl.float32) * tl.load(back + row * apart)
    tl.store(out + row * columns + at, part.to(out.dtype.element_ty), seen)


def _columns_kernel(  # type: ignore[no-untyped-def]
    x, out, back, given, starts, ends, places, columns, stride, length,
    largest: tl.constexpr, least: tl.constexpr, powers: tl.constexpr, multiple: tl.constexpr,
    by_row: tl.constexpr, tall: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    column = tl.program_id(1) * across + tl.arange(0, across)
    first, last = tl.load(starts + run).to(tl.int64), tl.load(ends + run).to(tl.int64)
    place = tl.load(places + run).to(tl.int64)
    down = tl.arange(0, tall)
    whole = (last - first + multiple - 1) // multiple * multiple
    inside = column < columns
    if by_row:
        most = tl.zeros((across,), tl.float32)
        for start in range(0, last - first, tall):
            row = first + start + down
            seen = (row < last)[:, None] & inside[None, :]
            part = tl.load(x + row[:, None] * stride + column[None, :], seen, 0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(part), 0), propagate_nan=tl.PropagateNan.ALL)
        scale = _scale(most, largest, least, powers)
    else:
        scale = tl.load(given + run) + tl.zeros((across,), tl.float32)
    tl.store(back + run * columns + column, tl.div_rn(1.0, scale), inside)
    for start in range(0, whole, tall):
        row = first + start + down
        seen = (row < last)[:, None] & inside[None, :]
        part = tl.load(x + row[:, None] * stride + column[None, :], seen, 0.0).to(tl.float32)
        made = (part * scale[None, :]).to(tl.float8e4nv)
        to = place + start + down
        written = (start + down < whole)[:, None] & inside[None, :]
        tl.store(out + column[None, :].to(tl.int64) * length + to[:, None], made, written)


_scale: Any = jit(_find_scale)
_rows: Any = jit(_rows_kernel)
_columns: Any = jit(_columns_kernel)
_widen: Any = jit(_widen_kernel)


class Runs(NamedTuple):
    """Runs of rows that follow each other, whole numbers [runs]."""

    starts: Tensor
    ends: Tensor
    places: Tensor
    """Where each goes to."""


def cast_rows(rows: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [r, c] in 8-bit floats, and by what each is multiplied to be as it was, float32 [r]:
    scaled to its own largest value by a power of two, or as is `given`, float32 [r]."""
    count, columns = rows.shape
    made = torch.empty(count, columns, dtype=NARROW, device=rows.device)
    back = torch.empty(count, dtype=torch.float32, device=rows.device)
    cast_rows_into(rows, made, back, given)
    return made, back


def cast_rows_into(rows: Tensor, made: Tensor, back: Tensor, given: Tensor | None = None) -> None:
    """Writes the same into `made` [r, c] and `back` [r] or [r, 1], whose rows may lie apart."""
    count, columns = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _rows[(count,)](
        rows, made, back, back if given is None else given, columns, rows.stride(0),
        made.stride(0), back.stride(0), LARGEST, LEAST, POWERS, given is None, _WIDE,
    )  # fmt: skip


def widened(values: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows [r, c] that were cast so, of a dtype."""
    count, columns = values.shape
    made = torch.empty(count, columns, dtype=dtype, device=values.device)
    grid = count, triton.cdiv(columns, _WIDE)
    _widen[grid](values, back, made, columns, values.stride(0), back.stride(0), _WIDE)
    return made


def cast_columns(
    rows: Tensor, runs: Runs, length: int, size: int, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs of rows [r, c] in 8-bit floats, turned, in one piece of memory of a size, and by what
    each run's column is multiplied to be as it was [runs, c]. Column i of a run is at its place
    plus i times the length, with zeros up to the next multiple; `given`: one scale for all of a run
    [runs], in place of one for each column."""
    columns = rows.shape[1]
    made = torch.empty(size, dtype=NARROW, device=rows.device)
    back = torch.empty(len(runs.starts), columns, dtype=torch.float32, device=rows.device)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _columns[(len(runs.starts), triton.cdiv(columns, _ACROSS))](
        rows, made, back, back if given is None else given, *runs, columns, rows.stride(0), length,
        LARGEST, LEAST, POWERS, MULTIPLE, given is None, _TALL, _ACROSS,
    )  # fmt: skip
    return made, back
