"""Tables of which each rank owns some columns of all rows: it is asked for every row, and whatever
rows occur, ranks have equal work."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.forms.owned_table import OwnedTable
from meshwright.forms.running import Held, Lines
from meshwright.ir.layout.nesting import Runs


class ColumnTable(OwnedTable):
    """A table [rows, columns] on one rank: columns that it owns, and rows that its blocks read."""

    knows_all = True

    def _own_part(self, whole: Tensor, lines: Lines) -> tuple[nn.Parameter, Held]:
        param, size = self.slot.param, lines.shards.size
        # As equal as they can be: chunks would leave the last ranks without any.
        bounds = [whole.shape[1] * index // size for index in range(size + 1)]
        self._widths = [stop - first for first, stop in pairwise(bounds)]
        first, stop = bounds[lines.shards.coordinate : lines.shards.coordinate + 2]
        shard = nn.Parameter(whole[:, first:stop].clone())
        of_rows, of_columns = param.runs
        own = replace(param, runs=(of_rows, tuple(_within(of_columns, first, stop))))
        primary = lines.is_primary(param, "dp_replicate")
        return shard, Held(own, lines.stage, shard, None, primary)

    def counts(self, rows: Tensor) -> Tensor:
        """Every rank is told of all of them."""
        return torch.full((self.owners,), len(rows), device=rows.device)

    def told(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.owners)

    def parted(self, rows: Tensor, owned: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(rows, self._widths, dim=1)

    def coming(self, owned: Sequence[int]) -> list[tuple[int, ...]]:
        return list(zip(owned, self._widths, strict=True))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)


def _within(runs: Runs, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of the elements that a rank has of a dim, those from number `first` on, up to `stop`."""
    at = 0
    for start, length in runs:
        low, high = max(at, first), min(at + length, stop)
        if low < high:
            yield start + low - at, high - low
        at += length
