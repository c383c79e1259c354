"""A small model nearly all of whose memory and time are its last product and loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class LastProduct(nn.Module):
    """A table of `words` x `width`, and the product with another; ids [tokens] are targets, too."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the loss."""
        return functional.cross_entropy(self.head(torch.tanh(self.table(ids))), ids)
