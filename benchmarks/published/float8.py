"""What float8 products with dynamic scales add to a layer."""

from dataclasses import replace

from benchmarks.published.ops import Piece, pointwise
from benchmarks.published.site import Site


def scaled(site: Site, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Float8 products with dynamic scales: largest value (2 bytes) and cast (3) of each operand."""
    if site.dtype != "float8":
        return pieces
    made: list[Piece] = []
    for piece in pieces:
        if piece.op.dtype == "float8":
            values = sum(i.nbytes for i in piece.op.inputs) // 2
            scale = pointwise("scale", values, 5, 5 * piece.op.output_bytes / 2 / values)
            made.append(replace(scale, name=f"scale {piece.name}"))
        made.append(piece)
    return tuple(made)
