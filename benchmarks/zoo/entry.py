"""One model of the zoo: how to build it and how to draw a batch for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor] | tuple[Tensor, ...]
Draw = Callable[[int, torch.Generator], Batch]
VOCAB, LENGTH, BATCH = 64, 16, 4
SEED = 1234


@dataclass(frozen=True, slots=True)
class Entry:
    """A model without dropout, tiny enough for float64 on one core."""

    name: str
    family: str
    """What it is: decoder, encoder, vision, plain …"""
    build: Callable[[], nn.Module]
    draw: Draw
    loss_fn: Callable[..., Tensor] | None = None

    def model(self) -> nn.Module:
        """The model with the same float64 weights every time, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build().double().train()

    def batch(self, seed: int, size: int = BATCH) -> Batch:
        """A batch in float64; the same for the same seed."""
        drawn = self.draw(size, torch.Generator().manual_seed(seed))
        if isinstance(drawn, dict):
            return {name: _double(tensor) for name, tensor in drawn.items()}
        return tuple(map(_double, drawn))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
