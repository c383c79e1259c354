"""Places of numbers that lie as a strided tensor does: what a rank needs to draw its part alone."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from meshwright.ir.launch import jit, tl
from meshwright.ir.random.philox import PER_BLOCK

LEADING = 3
"""Dims before the last that kernels can count through."""
NUMBERS = ("width", "middle", "inner", "outer_step", "middle_step", "inner_step")
"""Parameters of kernels that count through them: `RowPlaces.numbers`."""


def filled(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes of `count` elements, of which one size may be -1."""
    if len(sizes) == 1:
        return (count if sizes[0] < 0 else sizes[0],)
    rest = prod(size for size in sizes if size >= 0)
    return tuple(count // rest if size < 0 else size for size in sizes)


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """From the first number to the last, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rows of numbers that follow each other, and how rows lie."""

    numbers: tuple[int, ...]
    """Elements of a row, sizes of the last two of LEADING dims, steps of all."""
    whole: bool
    """Rows begin and end with blocks of numbers."""
    flat: bool
    """All is one row."""


@lru_cache(maxsize=4096)
def row_places(
    first: int, sizes: tuple[int, ...], strides: tuple[int, ...], per_sample: int = 0
) -> RowPlaces | None:
    """Of elements that lie in dims of `sizes`, from `first` on, or from multiples of `per_sample`
    beyond it; None if kernels cannot count through these."""
    *leading, run = zip(sizes, strides, strict=True)
    found = [dim for dim in leading if dim[0] != 1]
    if run[1] != 1 or len(found) > LEADING:
        return None
    (_, outer_step), (middle, middle_step), (inner, inner_step) = [
        *[(1, 0)] * (LEADING - len(found)), *found,
    ]  # fmt: skip
    steps = (outer_step, middle_step, inner_step)
    starts = (first, per_sample, *steps, run[0] if found else 0)
    whole = not any(start % PER_BLOCK for start in starts)
    return RowPlaces((run[0], middle, inner, *steps), whole, not found)


@jit
def place_of(
    element, first, width, middle, inner, outer_step, middle_step, inner_step,
    FLAT: tl.constexpr,
):  # fmt: skip
    """The place, of int64, of the number of an element, counted as it lies in memory; the
    parameters are `NUMBERS`. With FLAT all is one row."""
    if FLAT:
        return element.to(tl.int64) + first
    row = element // width
    before = row // inner
    return (
        first
        + (before // middle).to(tl.int64) * outer_step
        + (before % middle).to(tl.int64) * middle_step
        + (row % inner).to(tl.int64) * inner_step
        + element % width
    )
