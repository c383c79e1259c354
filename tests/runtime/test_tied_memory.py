"""Memory of gradients that several blocks add to: predicted beside tracked bytes of tensors."""

import pytest
import torch
from torch import Tensor, nn

from tests.told_memory import told_of_held


class _TiedEnds(nn.Module):
    """What it reads first it reads last, too, as language models do; and a block between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(2)
        )

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.table.weight), wanted)


@pytest.mark.parametrize("samples", [4, 256])
def test_a_tied_weights_gradient_is_there_from_the_last_reader_on(samples) -> None:
    """Its first reader makes one more beside it, which is the most of a small batch; that of a
    large one is in the loss, before there is any."""
    model, data = _TiedEnds(), (torch.arange(samples) * 7, torch.arange(samples))
    assert told_of_held(model, data, "fp32", "adamw") == pytest.approx(1.0, rel=0.01)
