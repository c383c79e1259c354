"""A recurrent network as users write it, and handwritten digits as sequences."""

from functools import cache

import torch
from sklearn.datasets import load_digits
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


@cache
def digit_rows() -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's digits in one fixed order: [1797, 8, 8] from 0 to 1 in float64, and
    labels."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16.0).view(-1, 8, 8)[order], torch.tensor(y)[order]
