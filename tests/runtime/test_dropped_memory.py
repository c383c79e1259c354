"""Memory of attention with dropout on a CPU: predicted beside tracked bytes of tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from meshwright.codegen.attention import dropped
from meshwright.ir.random import chances
from tests.told_memory import told_of_held


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.ahead(x).split(32, dim=2)
        heads = [part.view(*x.shape[:2], 2, 16).transpose(1, 2) for part in parts]
        made = scaled_dot_product_attention(*heads, dropout_p=0.25, is_causal=True)
        x = x + self.back(made.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(torch.tanh(self.wide(x)))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attends() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "kept"), [(32, chances.KEPT), (160, chances.KEPT), (160, 0)],
    ids=["few, by torch", "kept", "made again"],
)  # fmt: skip
def test_chances_are_in_the_memory_of_a_plan(monkeypatch, tokens, kept, precision) -> None:
    monkeypatch.setattr(chances, "KEPT", kept)
    monkeypatch.setattr(dropped, "KEPT", kept)
    assert _predicted_of_counted(_Layers(), tokens, precision) == pytest.approx(1.0, abs=0.03)


class _Drops(nn.Module):
    """Its masks are most of what it keeps: of a product in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = dropout(dropout(layer(x), 0.25), 0.25)
        return x.float().sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_masks_are_as_wide_as_what_they_multiply(precision) -> None:
    assert _predicted_of_counted(_Drops(), 512, precision) == pytest.approx(1.0, abs=0.03)


def _predicted_of_counted(model: nn.Module, tokens: int, precision: str) -> float:
    torch.manual_seed(0)
    return told_of_held(model, (torch.randn(4, tokens, 32),), precision)
