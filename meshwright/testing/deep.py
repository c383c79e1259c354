"""A model that is parameters, and little beside them: memory of states shows."""

import torch
from torch import Tensor, nn

WIDTH, DEPTH, SAMPLES = 512, 6, 8
PARAMETERS = DEPTH * WIDTH * WIDTH


class Deep(nn.Module):
    """Products one after another, each beside what it is given; what float64 computes is given in
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor]:
    """Returns the inputs, [SAMPLES, WIDTH]."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(SAMPLES, WIDTH, generator=draw).to(dtype),)
