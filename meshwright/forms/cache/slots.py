"""Which rows of a table are in which slots of a cache: no values, only numbers.

A batch's rows get slots together. Those that leave for them are never of the batch, nor of one that
was given slots before and is not over. Who leaves is a policy's to say (`forms.cache.policies`).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from meshwright.forms.cache.policies import Policy
from meshwright.ir.errors import PlanError

Ints = npt.NDArray[np.int64]
_NONE = -1


class TooFewSlots(PlanError):
    """Rows of batches that are not over do not fit."""

    def __init__(self, wanted: int, slots: int) -> None:
        """`wanted`: slots that would be enough."""
        super().__init__(f"{wanted:,} rows are needed at once, and there are {slots:,} slots")
        self.wanted = wanted


@dataclass(frozen=True, eq=False)
class SlotMoves:
    """What giving slots to rows moves."""

    at: Ints
    """Slots of the rows, in their order."""
    came: Ints
    """Rows that were in no slot."""
    into: Ints
    """The slots that they get."""
    left: Ints
    """Rows that have changed and have to leave their slots."""
    out_of: Ints
    """Those slots."""


@dataclass
class Counts:
    """What was asked for so far."""

    rows: int = 0
    """Of batches, each once."""
    rows_here: int = 0
    """Those that were in a slot."""
    lookups: int = 0
    """Repeats counted."""
    lookups_here: int = 0
    written: int = 0
    """Rows that left and had changed."""

    def hit_rate(self) -> float:
        """Returns the share of look-ups whose rows were in a slot; 1.0 where there were none."""
        return self.lookups_here / self.lookups if self.lookups else 1.0


@dataclass(eq=False)
class SlotMap:
    """Rows in slots, under a policy."""

    rows: int
    slots: int
    policy: Policy
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= max(1, self.rows) < 2**31:
            raise PlanError(
                f"{self.slots:,} slots for a table of {self.rows:,} rows: from 1 to as many"
            )
        self.slot_of = np.full(self.rows, _NONE, dtype=np.int32)
        self.row_in = np.full(self.slots, _NONE, dtype=np.int64)
        self.changed = np.zeros(self.slots, dtype=bool)
        self._locks = np.zeros(self.slots, dtype=np.int16)
        self._filled = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the map itself, in the host's memory; a policy's own are not in it."""
        own = (self.slot_of, self.row_in, self.changed, self._locks)
        return sum(x.nbytes for x in own)

    def admit(self, rows: Ints, times: Ints | None = None, *, count: bool = True) -> SlotMoves:
        """Gives slots to the distinct rows of a batch, and holds them until `release`.

        `times`: how often each is looked up, once if None; `count`: as asked for, and used.
        TooFewSlots if they do not fit beside those that are held; then nothing has changed.
        """
        at = self.slot_of[rows].astype(np.int64)
        is_here = at != _NONE
        came = rows[~is_here]
        free = self.slots - self._filled
        leaving = self._victims(at[is_here], max(0, len(came) - free))
        self._locks[at[is_here]] += 1
        left, changed = self.row_in[leaving], self.changed[leaving]
        self.slot_of[left] = _NONE
        into = np.concatenate([
            np.arange(self._filled, self._filled + min(free, len(came))), leaving
        ]).astype(np.int64)  # fmt: skip
        self._filled += min(free, len(came))
        self.slot_of[came], self.row_in[into] = into, came
        self.changed[into] = False
        self._locks[into] += 1
        at[~is_here] = into
        if len(came):
            self.policy.placed(came, into)
        if count:
            self._note(rows, at, times, is_here)
        self.counts.written += int(changed.sum())
        return SlotMoves(at, came, into, left[changed], leaving[changed])

    def _note(
        self, rows: Ints, at: Ints, times: Ints | None, is_here: npt.NDArray[np.bool_]
    ) -> None:
        own = np.ones(len(rows), dtype=np.int64) if times is None else times
        self.policy.used(rows, at, own)
        self.counts.rows += len(rows)
        self.counts.rows_here += int(is_here.sum())
        self.counts.lookups += int(own.sum())
        self.counts.lookups_here += int(own[is_here].sum())

    def _victims(self, needed: Ints, count: int) -> Ints:
        """Slots that are to be empty; none of those that are needed, or held."""
        if not count:
            return np.empty(0, dtype=np.int64)
        held = self._locks[: self._filled] > 0
        held[needed] = True
        candidates = np.flatnonzero(~held)
        if len(candidates) < count:
            raise TooFewSlots(self.slots + count - len(candidates), self.slots)
        if len(candidates) == count:
            return candidates
        worth = self.policy.worth(self.row_in[candidates], candidates)
        if count == 1:
            return candidates[[int(worth.argmin())]]
        return candidates[np.argpartition(worth, count - 1)[:count]]

    def release(self, rows: Ints) -> None:
        """The batch of these rows is over."""
        at = self.slot_of[rows]
        self._locks[at] -= 1

    def at(self, rows: Ints) -> Ints:
        """Returns the slots of rows, -1 for one that is in none."""
        return self.slot_of[rows].astype(np.int64)

    def changed_rows(self) -> tuple[Ints, Ints]:
        """Returns rows that have changed since they came, and their slots."""
        at = np.flatnonzero(self.changed)
        return self.row_in[at], at

    def clear(self) -> None:
        """All slots are empty from now on, and nothing is held."""
        self.slot_of[self.row_in[: self._filled]] = _NONE
        self.row_in[:], self.changed[:], self._locks[:] = _NONE, False, 0
        self._filled = 0
        self.policy.cleared()

    def grow(self, slots: int) -> None:
        """Adds empty slots."""
        more = slots - self.slots
        self.row_in = np.concatenate([self.row_in, np.full(more, _NONE, dtype=np.int64)])
        self.changed = np.concatenate([self.changed, np.zeros(more, dtype=bool)])
        self._locks = np.concatenate([self._locks, np.zeros(more, dtype=np.int16)])
        self.slots = slots
        self.policy.grown(slots)
