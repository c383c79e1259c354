"""Matrix products as kernels see them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod

NARROW = 64
"""Columns of the narrowest tile."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` products of an m x k with a k x n matrix."""

    batch: int
    m: int
    n: int
    k: int
    row: int = 0
    """Values that every row of the operands and of the result is a multiple of; 0: not known."""
    packed: tuple[int, int, int] = (1, 1, 1)
    """By how much m, n and k grow where a GPU puts as many narrow products of the batch as fit a
    tile into one, whose other blocks are zeros."""

    def for_input(self, window: int = 1) -> "Gemm":
        """The product that makes the left operand's gradient; `window` positions of a convolution
        go from the inner loop to the columns."""
        pm, pn, pk = self.packed
        k, n = self.k // window, self.n * window
        return Gemm(self.batch, self.m, k, n, self.row, (pm, pk, pn))

    def for_weight(self) -> "Gemm":
        """The product that makes the right operand's gradient."""
        pm, pn, pk = self.packed
        return Gemm(self.batch, self.n, self.k, self.m, self.row, (pn, pk, pm))

    def in_tiles(self) -> "Gemm":
        """With narrow products put together."""
        pm, pn, pk = self.packed
        together = max(self.packed)
        return Gemm(self.batch // together, self.m * pm, self.n * pn, self.k * pk, self.row)


CountProducts = Callable[[Sequence[tuple[int, ...]], float], tuple[Gemm, ...]]
"""From the shapes of a rank's operands and its flops."""


def matrix_products(left: int = 0, *, transposed: bool = False) -> CountProducts:
    """The products of an operand [..., m, k] with the next [..., k, n], or [n, k] if that is
    transposed; none where one is no matrix."""

    def count(shapes: Sequence[tuple[int, ...]], flops: float) -> tuple[Gemm, ...]:
        first, second = (*shapes[left : left + 2], (), ())[:2]
        if transposed:
            second = second[::-1]
        if len(first) < 2 or len(second) < 2 or not prod(first) * prod(second):
            return ()
        k, n = first[-1], second[-1]
        if len(second) == 2:
            return (Gemm(1, prod(first[:-1]), n, k, gcd(n, k)),)
        batch = max(prod(first[:-2]), prod(second[:-2]))
        return (Gemm(batch, first[-2], n, k, gcd(n, k)),)

    return count
