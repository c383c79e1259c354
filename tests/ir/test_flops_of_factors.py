"""Flops of factorisations, beside the loops of the textbook counted one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.trace.trace import trace

SIZE, COLUMNS, MATRICES = 48, 20, 3


class _Factors(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.scale * x).sum()


def _eliminated(n: int) -> int:
    """Column by column: the quotients, then all that is to the right and below."""
    return sum((n - k - 1) + 2 * (n - k - 1) ** 2 for k in range(n))


def _root(n: int) -> int:
    """Each value of a triangle is a product of two rows so far, and a quotient."""
    return sum(2 * column + 1 for column in range(n) for _ in range(column, n))


def _reflected(m: int, n: int) -> int:
    """Each reflection changes what is to the right and below it; they make Q the same way."""
    return 2 * sum(4 * (m - k) * (n - k) for k in range(n))


def _inverted(n: int) -> int:
    """Column j of the identity has nothing above its row j, and then all rows."""
    down = sum(2 * (row - column) for column in range(n) for row in range(column, n))
    return _eliminated(n) + down + n * n * n


CASES: list[tuple[str, Callable[[Tensor], Tensor], int]] = [
    ("linalg_cholesky", torch.linalg.cholesky, _root(SIZE)),
    ("linalg_slogdet", lambda x: torch.linalg.slogdet(x)[1], _eliminated(SIZE)),
    ("linalg_inv", torch.linalg.inv, _inverted(SIZE)),
    ("linalg_solve", lambda x: torch.linalg.solve(x, x[..., :COLUMNS]),
     _eliminated(SIZE) + 2 * SIZE**2 * COLUMNS),
    ("cholesky_solve", lambda x: torch.cholesky_solve(x[..., :COLUMNS], x),
     2 * SIZE**2 * COLUMNS),
    ("linalg_qr", lambda x: torch.linalg.qr(x[..., :COLUMNS])[0], _reflected(SIZE, COLUMNS)),
    ("matrix_power", lambda x: torch.matrix_power(x, 11), 5 * 2 * SIZE**3),
    ("matrix_power", lambda x: torch.matrix_power(x, -1), 2 * SIZE**3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "counted"), CASES)
def test_factorisations_are_counted_as_their_loops(
    name: str, call: Callable[[Tensor], Tensor], counted: int
) -> None:
    graph = trace(_Factors(call), (torch.eye(SIZE).repeat(MATRICES, 1, 1),))
    (op,) = (op for op in graph.ops if op.target.startswith(f"aten.{name}."))
    assert op.flops == pytest.approx(MATRICES * counted, rel=0.07)


def test_what_is_made_by_iteration_is_more_than_a_few_products() -> None:
    """Values alone are less than vectors, too."""
    found = []
    for call in (
        torch.linalg.eigvalsh, lambda x: torch.linalg.eigh(x)[1], torch.linalg.svdvals,
        lambda x: torch.linalg.svd(x, full_matrices=False)[0],
    ):  # fmt: skip
        graph = trace(_Factors(call), (torch.eye(SIZE).repeat(MATRICES, 1, 1),))
        found.append(max(op.flops for op in graph.ops) / MATRICES / SIZE**3)
    assert found == pytest.approx([4 / 3, 9, 8 / 3, 22], rel=1e-3)
