"""What float8 products with dynamic scales add to a layer."""

from dataclasses import replace

from benchmarks.published.ops import Piece, pointwise
from benchmarks.published.site import Site

_SCALE = 5
"""Bytes per value: the largest value (2), and the cast (2 + 1)."""
_CAST = 3
"""A compiler finds the largest value where the values are made."""
_TRANSPOSE = 2
_AFTER_NORM = ("qkv", "up", "gate and up")
_RESCALE = 4
"""Bytes per value of a gradient: read and written in half precision. Backward's products
accumulate slowly, where the kernel with scales per row is so slow that torchao calls the one with a
scale per tensor and multiplies its result afterwards, which the compiler makes a kernel of its own
of (torchao/float8/float8_ops.py; pytorch/ao, issue 2184)."""


def scaled(site: Site, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Casts before each product (torchao's float8 linears)."""
    if not site.float8:
        return pieces
    made: list[Piece] = []
    for piece in pieces:
        if piece.op.dtype.startswith("float8"):
            made.append((_cast_once if site.system.casts_once else _casts)(site, piece))
            if site.exact_weight_gradients:
                piece = replace(piece, weight_dtype=site.half)
        made.append(piece)
    return tuple(made)


def _cast_once(site: Site, piece: Piece) -> Piece:
    """Transformer Engine: one kernel casts and turns (2 + 1 + 1 bytes), or the layer norm before
    the product does, which then writes no half precision; weights are cast once per step. Current
    scaling finds the largest value first."""
    first = 2 if site.current_scaling else 0
    x, y = piece.op.inputs[0].nbytes // 2, piece.op.output_bytes // 2
    normed = piece.name in _AFTER_NORM
    forward = (first if normed else first + 4) * x
    return pointwise(f"scale {piece.name}", 1, forward, (first + 4) * y)


def _casts(site: Site, piece: Piece) -> Piece:
    """Scales per tensor: operands once, and turned for the weight's gradient, as tensor cores want
    float8 along the inner dim; before they are gathered, the weight on its shard. Scales per row:
    again along the other dim for each further product, and results of backward's products scaled.
    With exact gradients of weights neither operands nor results of their products are."""
    scale = _CAST if site.system.pointwise == "compiled" else _SCALE
    x, weight = (operand.nbytes // 2 for operand in piece.op.inputs)
    y = piece.op.output_bytes // 2
    if site.rowwise:
        forward = scale * x + _SCALE * weight
        backward = scale * y + _SCALE * weight + _RESCALE * x
        if not site.exact_weight_gradients:
            backward += scale * (y + x) + _RESCALE * weight
    else:
        gathered = any(m.phase == "forward" and m.primitive.value == "all_gather"
                       for m in piece.messages)  # fmt: skip
        forward = scale * (x // site.tp if gathered else x)
        backward = scale * y + _TRANSPOSE * (x + y)
    return pointwise(f"scale {piece.name}", 1, forward, backward)
