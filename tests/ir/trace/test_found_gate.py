"""Which gate a function is: found by running it, and none where it is of no file."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.ir.gates import gates, parse_gate, said
from meshwright.ir.trace.found_gate import found_gate, numbers_of
from meshwright.ir.trace.hf_experts import set_up

NUMBERS = {"limit": 7.0, "alpha": 1.7, "gate_cap": 30.0, "up_cap": 9.0}


def test_every_gate_is_found_by_what_it_computes() -> None:
    for name, gate in gates():
        text = said(name, {key: NUMBERS[key] for key in gate.settings})
        for parts in gate.parts:
            cut = (lambda x: x.chunk(2, -1)) if parts == 2 else (lambda x: (x,))
            compute = lambda x, cut=cut, text=text: parse_gate(text).forward(tuple(cut(x)))  # noqa: E731
            found = found_gate(compute, [0.5, *NUMBERS.values()], gated=parts == 2)
            assert found == text
            wide = lambda x, compute=compute: compute(x.float()).to(x.dtype)  # noqa: E731
            found = found_gate(wide, [0.5, *NUMBERS.values()], gated=parts == 2)
            assert found == f"{text} float32"
    turned = lambda x: F.silu(x[:, ::2]) * x[:, 1::2]  # noqa: E731
    assert found_gate(turned, (), gated=True, interleaved=True) == "silu"
    assert found_gate(turned, (), gated=True) == ""
    assert found_gate(lambda x: F.silu(x) * (1 + 1e-9), (), gated=False) == ""  # near to it


class Limited(nn.Module):
    """What experts of a model compute, with a limit that may be a whole number."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.width, self.limit = 64, limit

    def forward(self, product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def test_limits_show_whether_anyone_tells_of_them_or_not() -> None:
    for limit in (0.5, 7, 20.0, 1000):
        layer = Limited(limit)
        expected = f"clamped-silu limit={float(limit)}"
        assert found_gate(layer, numbers_of(layer), gated=True) == expected
        assert found_gate(layer, (), gated=True) == ""  # not plain silu, though it is below
        assert found_gate(layer, [limit * 1.01], gated=True) == ""


class Dense(nn.Module):
    """A layer of a user's own, by chance with the names of a layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 4)

    def _apply_gate(self, product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._apply_gate(self.gate_up_proj(x)))


def test_layers_that_are_no_experts_of_the_library_stay_as_they_are() -> None:
    layer = Dense()
    before = layer(torch.ones(2, 4))
    set_up(layer)
    assert torch.equal(layer(torch.ones(2, 4)), before) and "forward" not in vars(layer)
