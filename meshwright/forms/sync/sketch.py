"""S2 Reducer: rows that any replica has, as a count-sketch with error feedback (Ge et al. 2021).

Replicas agree on which rows have anything, as in `packed_rows`, hash the values of those rows with
random signs into fewer cells, and sum the cells. Each takes its estimates from them and keeps what
was lost of its own for the next step. Hashes are drawn anew in each step, alike on all ranks.

Searches try it on embedding tables of which it is known how many rows occur, if they are allowed
to.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite
from meshwright.forms.rows import MarkedRows, exchange_of_rows, unpacked_bits
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun, SyncState
from meshwright.forms.settings import FormSettings, Known, Number, Word, wrong_settings
from meshwright.ir.plan.plan import Setting, Stage

EXACT = False
CHANGES = "sketch"
SEARCHED = False
TABLES = ("rows",)
GIVES_UP = (
    "gradients of some parameters are estimated from sketches of them; what is lost in one step is "
    "made up for in later ones"
)
_SETTINGS: Known = {
    "cells": Number(0.5, 1e-6, 1e6), "tables": Number(1, 1, 99), "rows": Number(1.0, 1e-9, 1.0),
    "feedback": Word(("yes", "no")), "block": Number(0, 0, 2**40),
}  # fmt: skip
"""Cells per value of the rows that occur; tables among which they are shared out, of whose
estimates the median is taken; share of rows that any replica has; whether what is lost is kept;
values of a row (0: those of the first dim)."""
_HASHED = 60.0
"""Bytes that move per byte of rows that occur: 25 ns a value to hash it, to sum it into a cell and
to read it twice (a million float32 on one core of the 2-core machine, torch 2.13, 2026-11-25),
at 10 GB/s; on a GPU as many passes of 8 bytes over indices."""


def ladder() -> tuple[Mapping[str, Setting], ...]:
    """Returns settings that are worth trying, those that change least first."""
    return tuple({"cells": cells} for cells in (0.5, 0.25, 0.125))


def describe(
    replicas: int, zero: int = 0, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent, and what was lost, which is kept."""
    told = FormSettings(_SETTINGS, settings)
    rows = told.number("rows")
    moved = _HASHED * rows * told.whole("tables")
    hashed = Rewrite(what="gradients", unit="bucket", at=Event.END, moved=moved)
    lost = Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1)
    more = (hashed, lost) if told.word("feedback") == "yes" else (hashed,)
    return exchange_of_rows(rows * told.number("cells"), *more)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("sketch", _SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero:
        yield f"zero {stage.zero} splits rows over ranks; sketch has them whole", "zero 0"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    return _Sketched(slots, lines, told)


_TRIED = 64
"""Numbers among which there are some that have no divisor in common with another."""


class Hashes(NamedTuple):
    """Where each of some values goes in each table, and with which sign."""

    cells: Tensor
    """[tables, values]"""
    signs: Tensor
    """[tables, values]"""
    size: int
    """Cells of a table."""

    @classmethod
    def drawn(cls, values: int, size: int, tables: int, seed: int, like: Tensor) -> "Hashes":
        """Draws them: equal for equal arguments on all ranks. Cells are filled evenly, so that with
        as many as values each has its own: those of `size` values are i -> ai + b modulo `size`,
        with a and b drawn for them, a without a divisor in common with it."""
        generator = torch.Generator().manual_seed(seed)
        rounds = -(-values // size)
        tried = torch.randint(1, max(2, size), (_TRIED,), generator=generator)
        tried[0] = 1
        fit = tried[torch.gcd(tried, torch.tensor(size)) == 1]
        factors = fit[torch.randint(0, len(fit), (tables * rounds, 1), generator=generator)]
        shifts = torch.randint(0, size, (tables * rounds, 1), generator=generator)
        bits = torch.randint(0, 256, (-(-tables * values // 8),), generator=generator)
        cells = torch.arange(size, device=like.device) * factors.to(like.device)
        cells = cells.add_(shifts.to(like.device)).remainder_(size).view(tables, -1)[:, :values]
        negative = unpacked_bits(bits.to(like.device, torch.uint8), tables * values)
        signs = (1 - 2 * negative.to(like.dtype)).view(tables, values)
        return cls(cells, signs, size)

    def coded(self, values: Tensor) -> Tensor:
        """Sums [values] with their signs into [tables, cells]."""
        found = values.new_zeros((self.cells.shape[0], self.size))
        return found.scatter_add_(1, self.cells, self.signs * values)

    def decoded(self, coded: Tensor) -> Tensor:
        """Estimates the values from their cells."""
        estimates = coded.gather(1, self.cells) * self.signs
        return estimates[0] if len(estimates) == 1 else estimates.median(dim=0).values

    @property
    def shrink(self) -> float:
        """By which an estimate is multiplied, so that what it loses is less than what there was:
        others in the same cell add as much noise as there are of them."""
        return 1 / (1 + max(0.0, self.cells.shape[1] / self.size - 1))


class _Sketched(MarkedRows):
    def __init__(self, slots: Sequence[Slot], lines: Lines, told: FormSettings) -> None:
        super().__init__(slots, lines, told.whole("block"))
        self._feedback = told.word("feedback") == "yes"
        self._cells, self._tables = told.number("cells"), told.whole("tables")
        self._steps = 0
        self._lost: dict[int, Tensor] = {}
        """Of each gradient, what earlier steps did not send."""
        self._added = set[int]()
        """Gradients of this step to which that was added."""
        self._hashes: dict[int, Hashes] = {}

    def _sent(self, index: int) -> Tensor:
        gradient = super()._sent(index)
        if index in self._lost and index not in self._added:
            gradient += self._lost[index]
            self._added.add(index)
        return gradient

    def _coded(self, index: int, rows: Tensor, union: Tensor) -> Tensor:
        values = rows.index_select(0, union).flatten()
        if not values.numel():
            return values
        size = max(1, round(self._cells * values.numel() / self._tables))
        seed = self._steps * len(self._slots) + index
        hashes = Hashes.drawn(values.numel(), size, self._tables, seed, values)
        coded = hashes.coded(values)
        self._hashes[index] = hashes
        if self._feedback:
            kept = values - hashes.shrink * hashes.decoded(coded)
            if index not in self._lost:
                self._lost[index] = torch.zeros_like(self._sent(index))
            lost = self._rows(self._lost[index].zero_())[0]
            lost.index_copy_(0, union, kept.view(-1, rows.shape[1]))
        return coded

    def _decoded(self, index: int, values: Tensor) -> Tensor:
        if index not in self._hashes:
            return values
        hashes = self._hashes.pop(index)
        return hashes.shrink * hashes.decoded(values.view(hashes.cells.shape[0], -1))

    def finish(self) -> None:
        super().finish()
        self._added.clear()
        self._steps += 1

    @property
    def kept(self) -> list[Tensor]:
        return list(self._lost.values())

    def state(self) -> SyncState:
        lost = {f"lost {i}": x.clone() for i, x in self._lost.items()}
        return {"steps": self._steps, **lost} if self._steps else {}

    def load(self, state: SyncState) -> None:
        self._steps = int(state.get("steps", 0))
        self._lost = {
            int(key.removeprefix("lost ")): x.clone()
            for key, x in state.items() if key.startswith("lost ")
        }  # fmt: skip
