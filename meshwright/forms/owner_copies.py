"""Copies of owners of rows (dp_replicate): each has gradients of other rows, and all step the
same."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.forms.flat import sum_over_copies
from meshwright.forms.row_messages import Arriving, start_parts
from meshwright.forms.running import Lines
from meshwright.ir.profile.measured import Purpose


class RowsOfCopies:
    """Telling the other copies of this rank which rows it is asked for: how many of each table,
    then their numbers. Without copies nothing is told."""

    def __init__(self, found: Sequence[Tensor], lines: Lines, purpose: Purpose) -> None:
        """`found`: of each table, numbers of this rank's rows; several ranks may ask for one."""
        self._found, self._lines, self._purpose = list(found), lines, purpose
        self._numbers: Arriving | None = None
        if lines.copies.group is not None:
            self._own = [rows.unique() for rows in found]  # type: ignore[no-untyped-call]
            counts = torch.tensor([len(rows) for rows in self._own], device=found[0].device)
            self._counts = self._tell([counts], [[(len(found),)] * lines.copies.size])

    def _tell(self, own: Sequence[Tensor], coming: Sequence[Sequence[tuple[int, ...]]]) -> Arriving:
        peers = self._lines.copies
        parts = [[x] * peers.size for x in own]
        return start_parts(self._lines, parts, coming, self._purpose, peers)

    def go_on(self) -> None:
        """Numbers go, unless they have gone."""
        if self._lines.copies.group is not None and self._numbers is None:
            (counts,) = self._counts.values()
            each = torch.stack(counts).T.tolist()
            self._numbers = self._tell(self._own, [[(n,) for n in of] for of in each])

    def end(self) -> list[Tensor]:
        """Waits; of each table, rows that any copy is asked for, each once and ascending. Without
        copies they are as they were found."""
        self.go_on()
        if self._numbers is None:
            return self._found
        of_each = self._numbers.values()
        return [torch.cat(of).unique() for of in of_each]  # type: ignore[no-untyped-call]


def sum_rows_over_copies(values: Sequence[Tensor], lines: Lines) -> list[Tensor]:
    """Returns sums over copies of values of rows of several tables [rows, ...], which are the same
    rows on all copies: one message of each dtype."""
    found = list(values)
    if lines.copies.group is None:
        return found
    for dtype in dict.fromkeys(x.dtype for x in found):
        own = [number for number, x in enumerate(found) if x.dtype == dtype]
        flat = torch.cat([found[number].reshape(-1) for number in own])
        sum_over_copies(flat, lines)
        for number, x in zip(own, torch.split(flat, [found[n].numel() for n in own]), strict=True):
            found[number] = x.view(found[number].shape)
    return found
