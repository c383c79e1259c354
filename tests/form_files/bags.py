"""A model with tables of both kinds, of which a batch reads few rows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS, WIDTH, BATCH, STEPS = 61, 4, 12, 5


class Bags(nn.Module):
    """A table in bags, one by item, and a dense rest."""

    def __init__(self, *, lengths: bool = False, **of_bags: Any) -> None:
        """`lengths`: it is told how long bags are, and not where they begin."""
        super().__init__()
        self._lengths = lengths
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, **of_bags)
        self.items = nn.Embedding(23, WIDTH, padding_idx=0, scale_grad_by_freq=True)
        self.out = nn.Linear(WIDTH, 2)

    def forward(
        self, y: Tensor, item: Tensor, ids: Tensor, at: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self._lengths and at is not None:
            at = at.cumsum(0) - at
        x = torch.tanh(self.bags(ids, at, weights) + self.items(item).sum(1))
        return nn.functional.mse_loss(self.out(x), y)


def model(of_bags: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Bags(**of_bags).double().train()


def batch(step: int, kind: str = "even") -> dict[str, Tensor]:
    """Bags of 3 ids (`even`), the same with weights, or of any number where `at` says, the end
    said too (`ended`, with weights) or not, in each batch as many as it has; or 31 in bags as long
    as it says (`lengths`). In the second step the later samples have padding only, or nothing."""
    draw = np.random.default_rng(step)
    none = slice(BATCH // 2, None) if step == 1 else slice(0)
    item = draw.integers(0, 5, (BATCH, 2))
    item[none] = 0
    found = {"y": draw.standard_normal((BATCH, 2)), "item": item}
    if kind in ("given", "ended", "lengths"):
        count = 31 + 4 * step * (kind != "lengths")
        ids = draw.integers(0, ROWS, count)
        at = np.sort(draw.integers(0, count, BATCH))
        at[0] = 0
        at[none] = count
        found |= {"ids": ids, "at": np.append(at, count) if kind == "ended" else at}
        if kind == "lengths":
            found["at"] = np.diff(np.append(at, count))
        if kind == "ended":
            found["weights"] = draw.uniform(0.5, 2, count)
    else:
        ids = draw.integers(0, ROWS, (BATCH, 3))
        ids[none] = 0
        found["ids"] = ids
    if kind == "weighted":
        found["weights"] = draw.uniform(0.5, 2, (BATCH, 3))
    return {name: torch.from_numpy(x) for name, x in found.items()}


def plain(of_bags: dict[str, Any], kind: str, optimizer: str) -> Any:
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    own, losses = model(of_bags), []
    stepped = kinds[optimizer](own.parameters(), lr=0.05)
    for step in range(STEPS):
        stepped.zero_grad()
        loss = own(**batch(step, kind))
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}
