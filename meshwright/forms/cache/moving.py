"""Values of a table's rows: all on the host, some in slots on the device, with what the optimizer
keeps of each. They come and go over the host's link, in pieces of a bounded size."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.forms.host_link import HostLink
from meshwright.ir.comm.p2p_collectives import Waitable

PIECE_BYTES = 4 * 2**20
"""Of rows that go or come as one: what is copied on each side of the link, for a while."""
IN_FLIGHT = 16
"""Pieces on their way to the device, at most, that nobody has waited for."""
_MOST_DEPARTURES = 2**30
"""After which they are numbered anew."""

ByRow = Callable[[Tensor], Mapping[str, Tensor]]
"""Of a tensor that the optimizer holds, what it keeps of each of its rows, by name."""
_VALUES = ""


@dataclass(frozen=True, eq=False)
class _Arrival:
    """Rows of one tensor that are on their way to the device."""

    name: str
    at: Tensor
    came: Tensor
    staged: Tensor
    """What it comes from, which must stay until it has come."""
    work: Waitable


@dataclass(frozen=True, eq=False)
class _Departure:
    """Rows of one tensor that are on their way to the host."""

    number: int
    to: Tensor
    rows: Tensor
    staged: Tensor
    sent: Tensor
    work: Waitable


class RowsOnHost:
    """A table's rows, and what moves them."""

    def __init__(self, table: Tensor, slots: int, link: HostLink, device: torch.device) -> None:
        """`table`: all rows, on the host."""
        self._table, self._slots = table, slots
        self._left = np.zeros(len(table), dtype=np.int32)
        """Of each row, the number of the last departure that it was in; 0: none, or one that is
        over."""
        self._departures = 0
        """So many so far."""
        self._link, self._device = link, device
        self._state: ByRow = lambda _: {}
        self._here: dict[str, Tensor] = {}
        self._arriving: deque[_Arrival] = deque()
        self._leaving: deque[_Departure] = deque()

    def watch(self, state: ByRow) -> None:
        """Says what the optimizer keeps of the table's rows: it travels with them."""
        self._state = state

    def state_of_host(self) -> Mapping[str, Tensor]:
        """Returns what the optimizer keeps of all rows, by name."""
        return self._state(self._table)

    @property
    def here(self) -> list[Tensor]:
        """Slots' values, and what is kept of them: [slots, ...] each."""
        return list(self._here.values())

    @property
    def is_still(self) -> bool:
        """Whether nothing is on its way."""
        return not self._arriving and not self._leaving

    def _sources(self) -> dict[str, Tensor]:
        return {_VALUES: self._table.detach(), **self.state_of_host()}

    def _slots_of(self, name: str, like: Tensor) -> Tensor:
        found = self._here.get(name)
        if found is None or len(found) < self._slots:
            made = torch.zeros(
                (self._slots, *like.shape[1:]), dtype=like.dtype, device=self._device
            )
            if found is not None:
                made[: len(found)] = found
            self._here[name] = found = made
        return found

    @torch.no_grad()
    def fetch(self, rows: Tensor, at: Tensor) -> None:
        """Starts to bring rows of the host into slots; both on the host."""
        self._await(rows)
        for name, source in self._sources().items():
            here = self._slots_of(name, source)
            for own, slots in self._pieces(source, rows, at):
                while len(self._arriving) >= IN_FLIGHT:
                    self._land()
                staged = self._link.room(source.new_empty((len(own), *source.shape[1:])))
                torch.index_select(source, 0, own, out=staged)
                came = here.new_empty(staged.shape)
                work = self._link.arrive(staged, came)
                slots = slots.to(self._device)
                self._arriving.append(_Arrival(name, slots, came, staged, work))

    @torch.no_grad()
    def leave(self, rows: Tensor, at: Tensor) -> None:
        """Starts to bring what is in slots to rows of the host: the slots may be used at once."""
        for name, target in self._sources().items():
            here = self._slots_of(name, target)
            for own, slots in self._pieces(target, rows, at):
                while len(self._leaving) >= IN_FLIGHT:
                    self._write()
                sent = here.index_select(0, slots.to(self._device))
                staged = self._link.room(sent)
                work = self._link.leave(sent, staged)
                self._departures += 1
                self._left[own.numpy()] = self._departures
                self._leaving.append(_Departure(self._departures, target, own, staged, sent, work))
        if self._departures > _MOST_DEPARTURES:
            self._await_leaving()
            self._left[:], self._departures = 0, 0

    @staticmethod
    def _pieces(like: Tensor, rows: Tensor, at: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        row = max(1, like.nbytes // max(1, len(like)))
        most = max(1, PIECE_BYTES // row)
        if len(rows) <= most:
            return ((rows, at),) if len(rows) else ()
        return zip(torch.split(rows, most), torch.split(at, most), strict=True)

    def _land(self) -> None:
        one = self._arriving.popleft()
        one.work.wait()
        self._here[one.name].index_copy_(0, one.at, one.came)

    def _write(self) -> None:
        one = self._leaving.popleft()
        one.work.wait()
        one.to.index_copy_(0, one.rows, one.staged)

    def _await(self, rows: Tensor) -> None:
        """Those of some rows that are on their way to the host have come there."""
        if not self._leaving or not len(rows):
            return
        last = int(self._left[rows.numpy()].max())
        while self._leaving and self._leaving[0].number <= last:
            self._write()

    def _await_leaving(self) -> None:
        while self._leaving:
            self._write()

    @torch.no_grad()
    def settle(self) -> None:
        """All that is on its way is where it goes."""
        while self._arriving:
            self._land()
        self._await_leaving()

    @torch.no_grad()
    def land(self) -> None:
        """All that comes has come."""
        while self._arriving:
            self._land()

    @torch.no_grad()
    def in_slots(self, at: Tensor) -> Tensor:
        """Returns values of rows on the device, all of which are in slots."""
        self.land()
        return self._slots_of(_VALUES, self._table).index_select(0, at.to(self._device))

    @torch.no_grad()
    def read(self, rows: Tensor, at: Tensor) -> Tensor:
        """Returns values of rows on the device: of slots, and of those in none (`at` -1) of the
        host."""
        away = at < 0
        if not bool(away.any()):
            return self.in_slots(at)
        found = self.in_slots(at.clamp(min=0))
        self._await(rows[away])
        staged = self._link.room(found[: int(away.sum())])
        torch.index_select(self._table.detach(), 0, rows[away], out=staged)
        came = torch.empty_like(staged, device=self._device)
        self._link.arrive(staged, came).wait()
        found[away.to(self._device)] = came
        return found

    def state_at(self, at: Tensor) -> dict[str, Tensor]:
        """Returns what the optimizer keeps of slots, by name."""
        self.land()
        kept = self.state_of_host()
        return {name: self._slots_of(name, x).index_select(0, at) for name, x in kept.items()}

    @torch.no_grad()
    def write(self, at: Tensor, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """Slots get values, and what is kept of them."""
        for name, x in {_VALUES: values, **state}.items():
            self._here[name].index_copy_(0, at, x)

    def grow(self, slots: int) -> None:
        """There are more slots."""
        self.land()
        self._slots = slots

    def forget(self) -> None:
        """What is in slots is of no use, and what the optimizer keeps may be another now."""
        self.settle()
        self._here = {name: x for name, x in self._here.items() if name == _VALUES}
