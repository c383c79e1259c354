"""Tokens in 8-bit floats on their way to experts, and gradients of what experts make of them.

A row's scale is a power of two, and travels behind its values. So a row that has been rounded is
not changed by being rounded again: it does not matter over how many axes it goes, and one process
that rounds each row once has the same numbers. What comes home is a sum, and travels as it is.
"""

import torch
from torch import Tensor

from meshwright.ir.graph.cast_groups import NARROW, cast_rows_into, widened
from meshwright.ir.graph.scaled_groups import scale_of
from meshwright.ir.launch import way

SCALE_BYTES = 4
"""Of a row: a float32."""
KERNEL = "narrow_tokens"
"""As `TAKEN` has it."""


def pack(rows: Tensor) -> Tensor:
    """Returns rows [n, width] as bytes [n, width + 4]: values in 8 bits, then what they are
    multiplied by to be as they were."""
    count, width = rows.shape
    sent = rows.new_empty(count, width + SCALE_BYTES, dtype=torch.uint8)
    values, back = _parts(sent)
    if way(KERNEL, rows) == "triton":
        cast_rows_into(rows, values, back)
    elif len(rows):
        scale = scale_of(torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True), "row")
        values.copy_(rows * scale)
        back.copy_(1 / scale)
    return sent


def unpack(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows [n, width] of a dtype that has been packed."""
    values, back = _parts(sent)
    if way(KERNEL, sent) == "triton":
        return widened(values, back, dtype)
    # Powers of two, and values of four bits, are exact in whatever has the exponents of float32.
    wide = torch.promote_types(dtype, torch.bfloat16)
    return values.to(wide).mul_(back.to(wide)).to(dtype)


def rounded(rows: Tensor) -> Tensor:
    """Returns rows [n, width] as they are after such a way."""
    return unpack(pack(rows), rows.dtype)


def packed_bytes(rows: int, width: int) -> int:
    """Returns what so many rows of a width take on their way."""
    return rows * (width + SCALE_BYTES)


def _parts(sent: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, width] and factors [n, 1] of packed rows, as views."""
    width = sent.shape[1] - SCALE_BYTES
    return sent[:, :width].view(NARROW), sent[:, width:].view(torch.float32)
