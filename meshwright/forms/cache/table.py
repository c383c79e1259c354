"""A table that its owner has on the host, with the rows that occur most in slots on the device."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.forms.cache.beside import Beside
from meshwright.forms.cache.moving import ByRow, RowsOnHost
from meshwright.forms.cache.policies import Floats, policy
from meshwright.forms.cache.slots import Ints, SlotMap, SlotMoves, TooFewSlots
from meshwright.forms.flat import chunk_rows
from meshwright.forms.host_link import host_link
from meshwright.forms.owned_table import OwnedTable
from meshwright.forms.running import Found, Held, KeptRows, Lines, Slot, SomeRows
from meshwright.ir.errors import PlanError

WARM = 0.7
"""Of the slots, where counts are known, are filled with the rows that occur most."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What a plan says of a cache."""

    ratio: float
    """Slots per row of a rank."""
    policy: str
    depth: int
    """Batches whose rows are brought ahead."""

    def slots(self, rows: int) -> int:
        """Returns how many slots a rank has for so many rows of its own."""
        return min(max(1, rows), max(1, round(self.ratio * rows)))


class _InSlots(NamedTuple):
    """Rows of a batch, which are held in slots."""

    named: Tensor
    """As ranks have asked for them."""
    own: Ints
    """Numbers of those of this rank, each once."""
    at: Tensor
    """Their slots."""

    @classmethod
    def of(cls, named: Tensor, own: Ints, at: Ints) -> "_InSlots":
        """Holds slots as a tensor."""
        return cls(named, own, torch.from_numpy(at))


_NOTHING: Ints = np.empty(0, dtype=np.int64)


class CachedTable(OwnedTable):
    """Rows that a batch is about to read are in slots, and stay there until it is over."""

    def __init__(
        self, form: str, slot: Slot, ids: str, lines: Lines, settings: CacheSettings
    ) -> None:
        self._settings, self._of_rank = settings, lines.counts.get(slot.param.fqn)
        super().__init__(form, slot, ids, lines)
        if slot.param.sum_over:
            raise PlanError(
                f"gradients of {self.path} are summed over {', '.join(slot.param.sum_over)}, of "
                "which no cache knows; nearest is no store for it"
            )
        self.depth = settings.depth

    caches = True

    def _own_part(self, whole: Tensor, lines: Lines) -> tuple[nn.Parameter, Held]:
        param, link = self.slot.param, host_link(whole.device)
        self.start, stop = chunk_rows(self.count, self.owners, lines.shards.coordinate)
        values = link.room(whole[self.start : stop])
        link.leave(whole[self.start : stop], values).wait()
        shard = nn.Parameter(values)
        rows, slots = len(values), self._settings.slots(len(values))
        counts: Floats | None = self._of_rank
        if counts is not None:
            counts = counts[self.start : stop]
        known = counts if rows or counts is None else np.zeros(1)
        kind = policy(self._settings.policy, max(rows, 1), slots, known)
        self.map = SlotMap(max(rows, 1), slots, kind)
        self._counts = counts
        self.moving = RowsOnHost(shard, slots, link, whole.device)
        self._on_host = link.apart
        self._beside = Beside(whole.device)
        self._now: _InSlots | None = None
        """Of the batch that is trained on, whose rows are held."""
        self._ahead: deque[_InSlots] = deque()
        """Of batches that come, whose rows are held too, the next one first."""
        self._warm, self._told = counts is not None, False
        primary = lines.is_primary(param, "dp_replicate")
        return shard, Held(param, lines.stage, shard, (self.start, stop), primary)

    def watch(self, state: ByRow) -> None:
        self.moving.watch(state)

    def foresee(self, rows: Tensor) -> None:
        """Those that fit beside what is held come while others are trained on; of a batch that does
        not fit whole, none do."""
        if self._on_host:
            self._beside.begin(partial(self._foresee, rows))
        else:
            self._foresee(rows)

    def _foresee(self, rows: Tensor) -> None:
        if len(self._ahead) >= self.depth:
            return
        none = _InSlots.of(rows[:0], _NOTHING, _NOTHING)
        if self._ahead and not len(self._ahead[-1].own):  # in order: none may overtake
            self._ahead.append(none)
            return
        own = self._numbers(rows)
        try:
            moves = self.map.admit(own)
        except TooFewSlots:
            self._ahead.append(none)
            return
        self._move(moves)
        self._ahead.append(_InSlots.of(rows, own, moves.at))

    def admit(self, rows: Tensor) -> None:
        self._beside.join()
        if self._warm:
            self._fill()
        self._release_now()
        own: Ints | None = None
        if self._ahead and len((first := self._ahead.popleft()).own):
            own = first.own if first.named is rows else self._numbers(rows)
            if first.own is own or np.array_equal(first.own, own):
                self._now = first
                self.moving.land()
                return
            self.map.release(first.own)
        self._have(rows, self._numbers(rows) if own is None else own, count=True)
        self.moving.land()

    def _have(self, rows: Tensor, own: Ints, *, count: bool) -> None:
        """The batch that is trained on reads rows, which come; `count`: as `SlotMap.admit`."""
        try:
            moves = self.map.admit(own, count=count)
        except TooFewSlots:
            moves = self._make_room(own)
        self._now = _InSlots.of(rows, own, moves.at)
        self._move(moves)

    def _make_room(self, own: Ints) -> SlotMoves:
        """Lets batches that come go, and has more slots where that is not enough."""
        self._let_go()
        if len(own) > self.map.slots:
            if not self._told:
                warnings.warn(
                    f"a batch reads {len(own):,} rows of {self.path} that this rank owns, and its "
                    f"cache has {self.map.slots:,} slots: it grows to so many, and takes more "
                    f"memory than the plan says; ratio {len(own) / self.map.rows:.4g} or more in "
                    "the plan keeps that, or a smaller batch",
                    stacklevel=2,
                )
            self._told = True
            self.map.grow(len(own))
            self.moving.grow(len(own))
        return self.map.admit(own)

    def _fill(self) -> None:
        """Rows that occur most come first."""
        self._warm = False
        assert self._counts is not None
        count = min(int(WARM * self.map.slots), int((self._counts > 0).sum()))
        if count:
            most = np.sort(np.argpartition(-self._counts, count - 1)[:count])
            self._move(self.map.admit(most, count=False))
            self.map.release(most)

    def _move(self, moves: SlotMoves) -> None:
        if len(moves.left):
            self.moving.leave(torch.from_numpy(moves.left), torch.from_numpy(moves.out_of))
        if len(moves.came):
            self.moving.fetch(torch.from_numpy(moves.came), torch.from_numpy(moves.into))

    def _numbers(self, rows: Tensor) -> Ints:
        own = rows - self.start
        if self.owners > 1:  # several ranks may want one row
            own = own.unique()  # type: ignore[no-untyped-call]
        found: Ints = own.cpu().numpy()
        return found

    def _release_now(self) -> None:
        if self._now is not None:
            self.map.release(self._now.own)
        self._now = None

    def _let_go(self) -> None:
        """Rows of batches that come are held no longer."""
        for one in self._ahead:
            self.map.release(one.own)
        self._ahead.clear()

    def over(self) -> None:
        self._beside.join()
        self._let_go()
        self._release_now()

    def owned(self, rows: Tensor) -> Tensor:
        self._beside.join()
        now = self._now
        # Several ranks ask for a row several times, in an order of their own.
        if now is not None and now.named is rows and self.owners == 1:
            return self.moving.in_slots(now.at)
        own = (rows - self.start).cpu()
        return self.moving.read(own, torch.from_numpy(self.map.at(own.numpy())))

    def summed(self, found: Tensor, parts: Sequence[Tensor]) -> SomeRows:
        self._beside.join()
        if self._now is None or self._now.named is not found:
            own = self._numbers(found)
            if (self.map.at(own) < 0).any():  # of batches that were accumulated
                self.over()
                self._have(found, own, count=False)
        made = super().summed(found, parts)
        return SomeRows(made.of, made.rows, made.part, _KeptInSlots(self, made.rows))

    def flush(self) -> None:
        self._beside.join()
        rows, at = self.map.changed_rows()
        if len(rows):
            self.moving.leave(torch.from_numpy(rows), torch.from_numpy(at))
            self.map.changed[at] = False
        self.moving.settle()

    @property
    def is_flushed(self) -> bool:
        self._beside.join()
        return self.moving.is_still and not self.map.changed.any()

    def forget(self) -> None:
        self._beside.join()
        self._ahead.clear()
        self._now = None
        self.map.clear()
        self.moving.forget()
        self._warm = self._counts is not None

    @property
    def on_host(self) -> list[Tensor]:
        return [self.shard.detach()] if self._on_host else []

    @property
    def kept(self) -> list[Tensor]:
        self._beside.join()
        return self.moving.here

    @property
    def found(self) -> tuple[Found, ...]:
        self._beside.join()
        had = self.map.counts
        return (Found(self.path, self.map.slots, had.rows, had.rows_here, had.written),)


class _KeptInSlots(KeptRows):
    """Rows of a cached table that are about to be stepped."""

    def __init__(self, table: CachedTable, rows: Tensor) -> None:
        """`rows`: all of them, which are held."""
        self._table, self._rows = table, rows
        self._at = torch.from_numpy(table.map.at(rows.cpu().numpy()))

    def _of(self, rows: Tensor) -> Tensor:
        """Their slots."""
        if rows is self._rows:
            return self._at
        return torch.from_numpy(self._table.map.at(rows.cpu().numpy()))

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        return self._table.moving.state_at(self._of(rows).to(rows.device))

    def write(self, rows: Tensor, values: Tensor, state: Mapping[str, Tensor]) -> None:
        at = self._of(rows)
        self._table.moving.write(at.to(rows.device), values, state)
        self._table.map.changed[at.numpy()] = True

    def give_back(self) -> None:
        self._table.flush()
        self._table.forget()
