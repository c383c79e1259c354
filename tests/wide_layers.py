"""A model whose layers hand on four times as much as they have inside: in a pipeline, messages are
as large as what its stages save."""

import torch
from torch import Tensor, nn

WIDE, NARROW = 256, 64


class WideLayers(nn.Module):
    """Layers that save what they hand on, and a product to end with."""

    def __init__(self, wide: int = WIDE, narrow: int = NARROW, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, narrow), nn.Tanh(), nn.Linear(narrow, wide), nn.Sigmoid())
            for _ in range(layers)
        )
        self.last = nn.Linear(wide, narrow)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x).tanh().mean()


def rows() -> tuple[Tensor]:
    """A batch of 2,048."""
    return (torch.randn(2048, WIDE),)
