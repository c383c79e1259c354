"""Flops of contractions, beside those that torch counts of the products it makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshwright.ir.trace.trace import trace

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
_USUAL: dict[str, Any] = {
    "bias": None, "stride": [1], "padding": [0], "dilation": [1], "transposed": False,
    "output_padding": [0], "groups": 1,
}  # fmt: skip
_TURNED: dict[str, Any] = {"transposed": True}
_LAYER: dict[str, Any] = {
    "has_biases": False, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False,
    "batch_first": False,
}  # fmt: skip


def _cube(x: Tensor) -> Tensor:
    return x[:, :, None, None]


def _turned(weight: Tensor) -> Tensor:
    """Channels that go in first, as transposed convolutions have them."""
    return weight.movedim(1, 0)


def _gates(b: Tensor, count: int) -> list[Tensor]:
    """A cell's two weights, of so many gates."""
    return 2 * [b[:count].flatten(0, 1)]


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
        ("cdist", lambda x, a, b: torch.cdist(x, b[:4])),
        ("conv_transpose1d", lambda x, a, b: F.conv_transpose1d(x.mT, _turned(b))),
        ("conv_transpose3d", lambda x, a, b: F.conv_transpose3d(_cube(x.mT), _cube(_turned(b)))),
        ("convolution", lambda x, a, b: torch.convolution(x.mT, b[..., :3], **_USUAL)),
        ("convolution", lambda x, a, b: torch.convolution(x.mT, _turned(b), **_USUAL | _TURNED)),
        ("conv_tbc", lambda x, a, b: torch.conv_tbc(x, b[:3], a[0])),
        ("rnn_tanh", lambda x, a, b: torch.rnn_tanh(x, 0 * x[:1], [a, a], **_LAYER)[0]),
        ("rnn_relu", lambda x, a, b: torch.rnn_relu(x, 0 * x[:1], [a, a], **_LAYER)[0]),
        ("rnn_tanh_cell", lambda x, a, b: torch.rnn_tanh_cell(x[0], x[1], a, a)),
        ("gru_cell", lambda x, a, b: torch.gru_cell(x[0], x[1], *_gates(b, 3))),
        ("lstm_cell", lambda x, a, b: torch.lstm_cell(x[0], x[1:3].unbind(), *_gates(b, 4))[0]),
    ],
)  # fmt: skip
def test_contractions_are_counted_as_their_products(name: str, call: Call) -> None:
    model, x = _Contracts(call), torch.ones(4, 6, 16)
    ops = [op for op in trace(model, (x,)).ops if op.target.startswith(f"aten.{name}.")]
    with FlopCounterMode(display=False) as counted:
        model(x)
    # torch's counter knows nothing of these.
    unknown = {"dot": 16, "addmv": 16 * 16, "addbmm": 6 * 6 * 4 * 16, "bilinear": 24 * 8 * 16 * 16,
               "cdist": 4 * 6 * 16 * 16, "conv_tbc": 2 * 6 * 16 * 3 * 16}  # fmt: skip
    products = 2 * unknown.get(name, 0) or counted.get_total_flops()
    assert len(ops) == 1
    assert products <= ops[0].flops <= 1.07 * products  # the rest is what is added or weighted
