"""A model whose layers hand on four times as much as they have inside: in a pipeline, messages are
as large as what its stages save."""

import torch
from torch import Tensor, nn

WIDE, NARROW = 256, 64


class WideLayers(nn.Module):
    """Eight layers, and a product to end with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, NARROW), nn.Tanh(), nn.Linear(NARROW, WIDE), nn.Sigmoid())
            for _ in range(8)
        )
        self.last = nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x).tanh().mean()


def rows() -> tuple[Tensor]:
    """A batch of 2,048."""
    return (torch.randn(2048, WIDE),)
