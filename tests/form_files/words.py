"""A model of words, of which a batch reads few rows."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace

VOCAB, WIDTH, BATCH, TOKENS, STEPS = 203, 6, 12, 4, 8


class Words(nn.Module):
    """Two tables, of which few rows occur, and a dense rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.marks = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.Embedding(50, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, others: Tensor, y: Tensor) -> Tensor:
        x = self.words(ids).mean(1) + self.marks(others)
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Words().double().train()


def batch(step: int) -> tuple[Tensor, ...]:
    """Few ids, and in the third step one alone; some ranks' samples have rows of padding only."""
    draw = np.random.default_rng(step)
    high = 2 if step == 2 else VOCAB
    ids = draw.integers(0, high, (BATCH, TOKENS))
    if step == 1:
        ids[BATCH // 2 :] = 0
    return (
        torch.from_numpy(ids), torch.from_numpy(draw.integers(0, 5, (BATCH,))),
        torch.from_numpy(draw.standard_normal((BATCH, 3))),
    )  # fmt: skip


@cache
def graph() -> Graph:
    """Traced once, for plans and for the jobs of every rank that is forked after them."""
    return trace(model(), batch(0))


def plain(optimizer: str, lr: float, clip: float | None) -> Any:
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam, "sgd_momentum": partial(torch.optim.SGD, momentum=0.9),
    }  # fmt: skip
    return plainly(kinds[optimizer], lr, clip)


def plainly(make: Any, lr: float, clip: float | None) -> Any:
    """Losses and parameters of plain PyTorch, with the optimizer that `make` makes."""
    own, losses = model(), []
    stepped = make(own.parameters(), lr=lr)
    for step in range(STEPS):
        stepped.zero_grad()
        loss = own(*batch(step))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(own.parameters(), clip)
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for name, x in wanted[1].items():
        assert (found[1][name] - x).abs().max() <= 1e-10 * x.abs().max(), name


def error_beyond(job: Any) -> str:
    """What a job says to an id that is no row."""
    ids, *others = batch(0)
    try:
        job.step((ids.clone().fill_(VOCAB), *others))
    except Exception as error:
        return str(error)
    return ""
