"""A recurrent network as users write it, and sequences to learn."""

import torch
from torch import Tensor, nn


class LastState(nn.Module):
    """Scores of 10 classes from the last state of a recurrent layer over rows of 8 numbers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores [n, 10] of samples [n, moments, 8]."""
        states, _ = self.rnn(x)
        found: Tensor = self.head(states[:, -1])
        return found


def sequences(count: int) -> tuple[Tensor, Tensor]:
    """Returns samples [count, 8, 8] in float64, each a pattern of its class with noise, and
    labels."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 8, 8, generator=draw, dtype=torch.float64)
    labels = torch.randint(10, (count,), generator=draw)
    noise = torch.randn(count, 8, 8, generator=draw, dtype=torch.float64)
    return patterns[labels] + 0.3 * noise, labels
