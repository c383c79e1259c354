"""Two models that are mostly tables: of words, and of clicks; their batches.

Both are tables (`nn.Embedding`), of which a batch reads few rows, and a dense rest, so that others
can put tables of their own before the same rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.row_forms import library_tokens

Batch = dict[str, Tensor]
SEED = 7


class Tabled(nn.Module):
    """A model: looks rows up in tables, of which each has its own input, and goes on with them."""

    def __init__(
        self, sizes: Mapping[str, tuple[int, int]], rest: nn.Module, *, sparse: bool = False
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(*size, sparse=sparse) for name, size in sizes.items()}
        )
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        self.rest = rest


class Sentences(nn.Module):
    """The rest of a language model: attention over the words before, and the loss of the next word
    among words that were drawn (sampled softmax, as of models with tables of this size).

    From rows of `words` [batch, length, width] and of `candidates` [batch, length + drawn, width]:
    the word that comes at each place, then those drawn for the sentence.
    """

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.length = length

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        x = words + self.places
        for layer in self.layers:
            x = layer(x)
        right, drawn = candidates[:, : self.length], candidates[:, self.length :]
        scores = torch.cat([(x * right).sum(-1, keepdim=True), x @ drawn.transpose(1, 2)], -1)
        return -functional.log_softmax(scores, -1)[..., 0].mean()


class Attention(nn.Module):
    """A layer of a transformer that looks back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.into(self.norm(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Language(Tabled):
    """A language model; words are read and guessed by tables of their own."""

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        return self.rest(self.tables["words"](words), self.tables["candidates"](candidates))


class Clicks(nn.Module):
    """The rest of DLRM (Naumov et al. 2019): two MLPs and dot products of all features."""

    def __init__(self, dense: int, width: int, tables: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        lower = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("row", lower[0], persistent=False)
        self.register_buffer("column", lower[1], persistent=False)

    def forward(self, rows: list[Tensor], dense: Tensor, clicked: Tensor) -> Tensor:
        first = self.bottom(dense)
        stacked = torch.stack([first, *rows], 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.row, self.column]
        logit = self.top(torch.cat([first, dots], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logit, clicked)


class Recommender(Tabled):
    """DLRM with four tables."""

    def forward(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dense: Tensor, clicked: Tensor
    ) -> Tensor:
        rows = [self.tables[name](ids) for name, ids in zip("abcd", (a, b, c, d), strict=True)]
        return self.rest(rows, dense, clicked)


@dataclass(frozen=True)
class Case:
    """One of the models, and how batches of it are made."""

    name: str
    sizes: Mapping[str, tuple[int, int]]
    """(rows, width) of each table, by the name of the input that names its rows."""
    kind: type[Tabled]
    rest: Callable[[], nn.Module]
    make: Callable[[int], Batch]
    dtype: torch.dtype = torch.float32

    def batch(self, step: int) -> Batch:
        """The whole of a step."""
        made = self.make(step)
        return {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in made.items()}

    def model(self, *, sparse: bool = False) -> Tabled:
        """With the same values every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            made = self.kind(self.sizes, self.rest(), sparse=sparse).train()
        return made.to(self.dtype)


@cache
def tokens() -> np.ndarray:
    """The library's words; processes that are forked later share them."""
    return library_tokens()


def language(
    width: int = 64, sentences: int = 64, length: int = 32, drawn: int = 64, layers: int = 2
) -> Case:
    """A language model of all words of the library."""
    ids = tokens()
    rows = int(ids.max()) + 1

    def batch(step: int) -> Batch:
        start = step * sentences * (length + 1) % (len(ids) - sentences * (length + 1))
        text = ids[start : start + sentences * (length + 1)].reshape(sentences, length + 1)
        draw = np.random.default_rng((SEED, step))
        others = ids[draw.integers(0, len(ids), (sentences, drawn))]
        candidates = np.concatenate([text[:, 1:], others], 1)
        return {
            "words": torch.from_numpy(text[:, :-1].copy()),
            "candidates": torch.from_numpy(candidates),
        }

    sizes = {"words": (rows, width), "candidates": (rows, width)}
    return Case(
        "language model", sizes, Language, lambda: Sentences(width, 4, layers, length), batch
    )


def recommender(
    width: int = 32,
    samples: int = 2048,
    rows: int = 50_000,
    zipf: float = 1.05,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """DLRM with four tables, whose rows occur as Zipf has it."""
    dense, names = 13, "abcd"
    share = np.arange(1, rows + 1, dtype=float) ** -zipf
    upto = np.cumsum(share / share.sum())

    def batch(step: int) -> Batch:
        draw = np.random.default_rng((SEED, step))
        ids = np.minimum(np.searchsorted(upto, draw.random((len(names), samples))), rows - 1)
        x = draw.standard_normal((samples, dense)).astype(np.float32)
        return {
            **{name: torch.from_numpy(own) for name, own in zip(names, ids, strict=True)},
            "dense": torch.from_numpy(x),
            "clicked": torch.from_numpy((x[:, 0] + ids[0] % 2 > 0.5).astype(np.float32)),
        }

    sizes = {name: (rows, width) for name in names}
    return Case("DLRM", sizes, Recommender, lambda: Clicks(dense, width, len(names)), batch, dtype)
