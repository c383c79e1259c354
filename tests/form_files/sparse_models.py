"""Models with tables of which few rows occur beside a dense part: a recommender, and a language
model with a large table."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH, STEPS, ITEMS = 8, 5, 4000
OPTIMIZER = {"recommender": "adam", "language": "sgd"}
"""Adam divides by the size of gradients, which of an attention's key biases are rounding only."""


class Recommender(nn.Module):
    """A DLRM (Naumov et al. 2019): dense features through a net, categories through tables, pairs
    of them multiplied, a net on top."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.users = nn.Embedding(ITEMS, width)
        self.items = nn.EmbeddingBag(ITEMS, width, mode="sum", padding_idx=0)
        self.days = nn.Embedding(7, width)
        self.top = nn.Sequential(nn.Linear(width + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, user: Tensor, seen: Tensor, day: Tensor, y: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = torch.stack([x, self.users(user), self.items(seen), self.days(day)], dim=1)
        products = found @ found.transpose(1, 2)
        first, second = torch.triu_indices(4, 4, 1)
        pairs = products.reshape(-1, 16)[:, (first * 4 + second)]
        said = self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(said, y)


class Language(nn.Module):
    """A transformer over a large table of words, which its output layer does not share."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ITEMS, width), nn.Embedding(6, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, 11)

    def forward(self, ids: Tensor, place: Tensor, y: Tensor) -> Tensor:
        x = self.words(ids) + self.places(place)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), y.flatten())


def model(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {"recommender": Recommender, "language": Language}[kind]()
        return made.double().train()


def batch(kind: str, step: int) -> tuple[Tensor, ...]:
    draw = np.random.default_rng(step)
    if kind == "recommender":
        found: tuple[Any, ...] = (
            draw.standard_normal((BATCH, 5)), draw.integers(0, 60, BATCH),
            draw.integers(0, 40, (BATCH, 3)), draw.integers(0, 7, BATCH),
            draw.integers(0, 2, BATCH).astype(float),
        )  # fmt: skip
    else:
        found = (
            draw.integers(0, 60, (BATCH, 6)), np.tile(np.arange(6), (BATCH, 1)),
            draw.integers(0, 11, (BATCH, 6)),
        )  # fmt: skip
    return tuple(torch.from_numpy(x) for x in found)


def plain(kind: str) -> Any:
    own, losses = model(kind), []
    made: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    stepped = made[OPTIMIZER[kind]](own.parameters(), lr=0.05)
    for step in range(STEPS):
        stepped.zero_grad()
        loss = own(*batch(kind, step))
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}
