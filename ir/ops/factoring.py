"""Factorisations of matrices, and what is solved or made by them: by the leading terms of their
counts (Golub and Van Loan, Matrix Computations, 4th edition; LAPACK Working Note 41)."""

from collections.abc import Callable
from functools import partial
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf, named

_OF_AN_EXPONENTIAL = 5
"""Products of torch's longest polynomial (`compute_T18` of LinearAlgebra's kernels); how often its
result is squared then depends on values."""

_Count = Callable[[int, int], float]
"""Of a matrix with so many rows and columns, of which there are at least as many rows."""


def _flops(count: _Count, args: Args, of: ShapeOf, out: Shape) -> int:
    """Of each matrix of the first argument."""
    *batch, rows, columns = of(next(iter(args.values())))
    return round(prod(batch) * count(max(rows, columns), min(rows, columns)))


def _solve_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """A triangle from each side, of each value that is solved for, after they have been made."""
    *batch, _, size = of(args.get("A"))
    return round(prod(batch) * 2 * size**3 / 3) + 2 * size * prod(of(args.get("B")))


def _by_triangle_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """The same with triangles that are there."""
    return 2 * prod(out) * of(args.get("input2"))[-1]


def _power_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """A square for each binary digit after the first, and a product for each that is 1; a power
    below 0 is one of the inverse."""
    power = args.get("n")
    assert isinstance(power, int)
    digits = f"{abs(power):b}"
    products = len(digits) + digits.count("1") - 2 if power else 0
    return 2 * prod(out) * out[-1] * (products + (power < 0))


def _counted(names: str, count: _Count) -> dict[str, OpFacts]:
    return named(names, OpFacts(op_class=OpClass.MATMUL, flops=partial(_flops, count)))


FACTS = {
    **_counted("cholesky linalg_cholesky linalg_cholesky_ex", lambda m, n: n**3 / 3),
    **_counted("cholesky_inverse", lambda m, n: 2 * n**3 / 3),
    **_counted(
        "det logdet slogdet linalg_det linalg_slogdet linalg_lu linalg_lu_factor "
        "linalg_lu_factor_ex",
        lambda m, n: n * n * (m - n / 3),
    ),
    **_counted("inverse linalg_inv linalg_inv_ex", lambda m, n: 2 * n**3),
    **_counted("linalg_qr qr", lambda m, n: 4 * n * n * (m - n / 3)),
    **_counted("linalg_svdvals", lambda m, n: 4 * n * n * (m - n / 3)),
    **_counted("linalg_svd svd", lambda m, n: 14 * m * n * n + 8 * n**3),
    **_counted("linalg_pinv pinverse", lambda m, n: 16 * m * n * n + 8 * n**3),
    **_counted("linalg_eigvalsh", lambda m, n: 4 * n**3 / 3),
    **_counted("linalg_eigh", lambda m, n: 9 * n**3),
    **_counted("linalg_eigvals", lambda m, n: 10 * n**3),
    **_counted("linalg_eig", lambda m, n: 25 * n**3),
    **_counted("matrix_exp linalg_matrix_exp", lambda m, n: _OF_AN_EXPONENTIAL * 2 * n**3),
    **named("linalg_solve linalg_solve_ex", OpFacts(op_class=OpClass.MATMUL, flops=_solve_flops)),
    **named("cholesky_solve", OpFacts(op_class=OpClass.MATMUL, flops=_by_triangle_flops)),
    **named(
        "matrix_power linalg_matrix_power", OpFacts(op_class=OpClass.MATMUL, flops=_power_flops)
    ),
}
