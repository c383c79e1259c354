"""Flops of contractions, beside those that torch counts of the products it makes of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.ir.trace.trace import trace

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Contracts(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.square = nn.Parameter(torch.ones(16, 16))
        self.cube = nn.Parameter(torch.ones(8, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.square, self.cube).sum()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("einsum", lambda x, a, b: torch.einsum("bsi,ij->bsj", x, a)),
        ("einsum", lambda x, a, b: torch.einsum("bsi,bti", x, x * a[0])),
        ("einsum", lambda x, a, b: torch.einsum("bsi,bti->bst", x, x * a[0])),
        ("einsum", lambda x, a, b: torch.einsum("...i,ij,jk->...k", x, a, a)),
        ("einsum", lambda x, a, b: torch.einsum("...i,nij->...nj", x, b)),
        ("bilinear", lambda x, a, b: nn.functional.bilinear(x, x, b)),
        ("tensordot", lambda x, a, b: torch.tensordot(x, a, 1)),
        ("inner", lambda x, a, b: torch.inner(x, a)),
        ("addbmm", lambda x, a, b: torch.addbmm(a[:6, :6], x, x.mT)),
        ("linalg_multi_dot", lambda x, a, b: torch.linalg.multi_dot([x.flatten(0, 1), a, a])),
        ("addmv", lambda x, a, b: torch.addmv(a[0], a, a[1])),
        ("dot", lambda x, a, b: torch.dot(a[0], a[1])),
    ],
)  # fmt: skip
def test_contractions_are_counted_as_their_products(name: str, call: Call) -> None:
    model, x = _Contracts(call), torch.ones(4, 6, 16)
    ops = [op for op in trace(model, (x,)).ops if op.target.startswith(f"aten.{name}.")]
    with FlopCounterMode(display=False) as counted:
        model(x)
    # torch's counter knows nothing of these.
    unknown = {"dot": 16, "addmv": 16 * 16, "addbmm": 6 * 6 * 4 * 16, "bilinear": 24 * 8 * 16 * 16}
    products = 2 * unknown.get(name, 0) or counted.get_total_flops()
    assert len(ops) == 1
    assert products <= ops[0].flops <= 1.07 * products  # the rest is what is added or weighted
