"""Who holds which keys while they go round a ring of ranks, and which of them a query sees."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.codegen.attention.attend import Visible
from meshwright.codegen.collectives.comm import Comm


@dataclass(frozen=True)
class Share:
    """How the ranks share a sequence: so many elements each, of every section."""

    sizes: tuple[int, ...]
    sections: int = 1
    zigzag: bool = False
    """Every second section is shared out in reverse; all sizes are equal then."""

    def starts(self, rank: int) -> list[int]:
        """Where a rank's runs begin in the sequence, ascending."""
        ways = rank, len(self.sizes) - 1 - rank if self.zigzag else rank
        return [i * sum(self.sizes) + sum(self.sizes[: ways[i % 2]]) for i in range(self.sections)]

    def count(self, rank: int) -> int:
        return self.sizes[rank] * self.sections


class VisiblePair(NamedTuple):
    """Queries and keys here, as slices, and what these queries see of these keys."""

    rows: slice
    columns: slice
    visible: Visible


@dataclass(frozen=True)
class Ring:
    """What the ranks of an axis hold."""

    comm: Comm
    axis: str
    queries: Share
    keys: Share
    scale: float
    causal: bool
    lead: tuple[int, ...]
    """Shape of keys before the sequence, the same on all ranks: [..., g]."""
    widths: tuple[int, int]
    """Of a key and of a value."""

    @property
    def rank(self) -> int:
        return self.comm.coordinates[self.axis]

    @property
    def size(self) -> int:
        return len(self.keys.sizes)

    def owner(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.rank - step) % self.size

    def numel(self, owner: int) -> int:
        """Of an owner's keys and values."""
        return prod(self.lead) * self.keys.count(owner) * sum(self.widths)

    def parts(self, packed: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a message."""
        shapes = [(*self.lead, self.keys.count(owner), width) for width in self.widths]
        key, value = torch.split_with_sizes(packed, [prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def columns(self, mask: Tensor, owner: int) -> list[Tensor]:
        """The mask of an owner's keys, run by run."""
        if mask.shape[-1] == 1:
            return [mask]
        size = self.keys.sizes[owner]
        return [mask[..., start : start + size] for start in self.keys.starts(owner)]

    def pieces(self, owner: int, mask: Tensor | None) -> Iterator[VisiblePair]:
        """What this rank's queries see of the owner's keys."""
        if self.causal:
            yield from self._up_to_own_place(owner)
        else:
            mine = None if mask is None else torch.cat(self.columns(mask, owner), -1)
            yield VisiblePair(slice(None), slice(None), Visible(self.scale, mine))

    def _up_to_own_place(self, owner: int) -> Iterator[VisiblePair]:
        """Keys that all of some queries see, runs of queries that see the same ones together; and
        of each run of queries the keys that some of them see."""
        rows, keys = self.queries.sizes[self.rank], self.keys.sizes[owner]
        first = [
            [place - start for start in self.keys.starts(owner)]
            for place in self.queries.starts(self.rank)
        ]
        past = [sum(at >= keys - 1 for at in its) for its in first]
        begin = 0
        for count, alike in groupby(past):
            end = begin + len(list(alike))
            if count:
                here, there = slice(begin * rows, end * rows), slice(0, count * keys)
                yield VisiblePair(here, there, Visible(self.scale))
            begin = end
        for i, its in enumerate(first):
            for j, at in enumerate(its[past[i] :], past[i]):
                if at + rows > 0:
                    here, there = (slice(n * k, (n + 1) * k) for n, k in ((i, rows), (j, keys)))
                    yield VisiblePair(here, there, Visible(self.scale, first=at))

    def rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Step by step whose keys are here, the keys and the values."""
        packed = key.new_empty(self.numel(self.rank))
        for place, x in zip(self.parts(packed, self.rank), (key, value), strict=True):
            place.copy_(x)  # as it lies: heads of a token may be side by side
        for step in range(self.size):
            arrive = None
            if step < self.size - 1:
                shape = (self.numel(self.owner(step + 1)),)
                arrive = self.comm.shift(packed, self.axis, shape)
            yield step, *self.parts(packed, self.owner(step))
            packed = arrive() if arrive else packed
