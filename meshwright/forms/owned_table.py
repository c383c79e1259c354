"""Tables of which a rank has its rows, and those that its blocks read now."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.forms.flat import chunk_rows, frozen, trainable
from meshwright.forms.row_messages import joined
from meshwright.forms.rows import torn_rows
from meshwright.forms.rows_here import NamedRows, RowsHere
from meshwright.forms.running import Found, Held, Lines, ParameterStore, Samples, Slot, SomeRows
from meshwright.forms.sync import ids_of
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Stage

Together = tuple[Sequence[Slot], Stage, ParameterStore]
"""Tables of which a stage says the same, and their store."""


def owned_tables(
    form: str,
    groups: Sequence[Together],
    lines: Lines,
    kind: "type[OwnedTable] | None" = None,
) -> tuple[list["OwnedTable"], list[Slot]]:
    """Returns the tables of groups of which the stage says different settings, and what is not
    trained; `kind`: what a rank has of one, rows if None. PlanError for a table of which model
    axes split rows, or that has none."""
    tables, still = [], []
    for slots, stage, store in groups:
        ids = next(iter(ids_of(stage).values()), "")
        for slot in slots:
            if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
                raise PlanError(str(torn_rows(form, slot.param.fqn)))
        make = store.table or kind or OwnedTable
        tables += [make(form, slot, ids, lines) for slot in trainable(slots)]
        still += frozen(slots)
    return tables, still


class OwnedTable:
    """A table on one rank: rows that it owns, and those that its blocks read now."""

    def __init__(self, form: str, slot: Slot, ids: str, lines: Lines) -> None:
        """`ids`: the input that names the rows."""
        size, whole = lines.shards.size, slot.whole.detach()
        self.slot, self.path = slot, slot.param.fqn
        self._form, self._ids, self._device = form, ids, whole.device
        self.count, self.owners, self.chunk = slot.rows, size, -(-slot.rows // size)
        self.start = 0
        """The first row that the rank has."""
        self.shard, self.held = self._own_part(whole, lines)
        self.here = RowsHere(self.path, NamedRows(torch.empty(0, dtype=torch.int64)))
        """Rows that blocks have."""
        self._row = whole.shape[1:]
        self.drop()

    def _own_part(self, whole: Tensor, lines: Lines) -> tuple[nn.Parameter, Held]:
        """Of a table, what this rank steps."""
        param = self.slot.param
        self.start, stop = chunk_rows(self.count, self.owners, lines.shards.coordinate)
        shard = nn.Parameter(whole[self.start : stop].clone())
        primary = lines.is_primary(param, "dp_replicate")
        return shard, Held(param, lines.stage, shard, (self.start, stop), primary)

    def rows(self, batch: Samples) -> NamedRows:
        """Those that a batch of this rank reads."""
        return NamedRows.of(self._named(batch), self.count)

    def has_all(self, batch: Samples) -> bool:
        """Whether blocks have all rows that a batch of this rank reads."""
        return self.here.has(self._named(batch), self.count)

    def _named(self, batch: Samples) -> Tensor:
        if self._ids not in batch:
            given = ", ".join(batch)
            raise PlanError(f"{self._form} reads rows from input {self._ids!r}; given are {given}")
        return batch[self._ids].detach().to(self._device).flatten().long()

    def put(self, named: NamedRows, values: Tensor) -> None:
        """Blocks have these rows from now on, and no gradient of them."""
        self.slot.whole.grad = None
        self.here, self.slot.whole.data = RowsHere(self.path, named), values

    def drop(self) -> None:
        """Blocks have none."""
        nothing = self.slot.whole.detach().new_empty((0, *self._row))
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        self.put(NamedRows(none), nothing)

    knows_all = False
    """What one owner is told, all are."""
    caches = False
    """Rows that ranks train on are elsewhere than those of which they want only the loss."""
    depth = 0
    """Batches that it makes use of to know before they come."""

    def foresee(self, rows: Tensor) -> None:
        """Ranks read these rows of this one in the batch after those that it was told of."""

    def admit(self, rows: Tensor) -> None:
        """Ranks have these rows from now on, to train on."""

    def over(self) -> None:
        """They have none, and those that were told of do not come."""

    def watch(self, state: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        """As of `SyncRun`."""

    def flush(self) -> None:
        """What is held is to have all values."""

    @property
    def is_flushed(self) -> bool:
        """Whether it has."""
        return True

    def forget(self) -> None:
        """What is held has other values."""

    @property
    def kept(self) -> list[Tensor]:
        """As of `SyncRun`."""
        return []

    @property
    def on_host(self) -> list[Tensor]:
        """The same."""
        return []

    @property
    def found(self) -> tuple[Found, ...]:
        """The same."""
        return ()

    def owned(self, rows: Tensor) -> Tensor:
        """Values of some rows of this rank."""
        return self.shard.detach().index_select(0, rows - self.start)

    def gradient(self) -> Tensor:
        """Of the rows that blocks have, as far as it has been summed."""
        whole = self.slot.whole
        return torch.zeros_like(whole.detach()) if whole.grad is None else whole.grad

    def total(self) -> Tensor:
        """Zeros, to sum gradients of this rank's own rows in."""
        return torch.zeros_like(self.shard.detach())

    @staticmethod
    def add(total: Tensor, places: Tensor, parts: Sequence[Tensor]) -> None:
        """Adds gradients of some rows that came, from each rank, where they belong."""
        # Source by source in the order of ranks: two runs are equal.
        numbers = torch.split(places, [len(part) for part in parts])
        for own, x in zip(numbers, parts, strict=True):
            total.index_add_(0, own, x)

    def summed(self, found: Tensor, parts: Sequence[Tensor]) -> SomeRows:
        """The rows of which gradients came, from each rank, with their sums."""
        if len(parts) == 1:  # a rank tells each of its rows once
            # What blocks have of them is that, and nobody reads it again.
            is_here = found is self.here.rows
            part = nn.Parameter(self.slot.whole.detach() if is_here else self.owned(found))
            part.grad = parts[0].contiguous()
            return SomeRows(self.shard, found - self.start, part)
        rows, places = found.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        part = nn.Parameter(self.owned(rows))
        part.grad = torch.zeros_like(part.detach())
        self.add(part.grad, places, parts)
        return SomeRows(self.shard, rows - self.start, part)

    def counts(self, rows: Tensor) -> Tensor:
        """How many of some rows each rank has to be told of, [ranks]."""
        return torch.bincount(rows // self.chunk, minlength=self.owners)

    def told(self, rows: Tensor) -> Tensor:
        """What ranks are told of them, rank after rank."""
        return rows

    def parted(self, rows: Tensor, owned: Sequence[int]) -> Sequence[Tensor]:
        """What each rank owns of some rows, so many of which it was told of."""
        return torch.split(rows, list(owned))

    def coming(self, owned: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of the same as each rank sends it."""
        return [(n, *self.shard.shape[1:]) for n in owned]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows, of which each rank has sent what it owns."""
        return joined(parts)
