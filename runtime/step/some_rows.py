"""Steps of parameters of which some rows have a gradient: those alone, where that is the same."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.forms.running import SomeRows, SyncRun
from meshwright.forms.updates import Update, resting
from meshwright.runtime.step.later_update import is_like
from meshwright.runtime.step.planned_updates import members_of


@contextmanager
def rows_only(optimizer: torch.optim.Optimizer, syncs: Sequence[SyncRun]) -> Iterator[None]:
    """While it is open, the optimizer steps the rows that have a gradient, for the same result as
    if it stepped all; where it would not be the same, it gets the gradients of all rows."""
    found = [some for sync in syncs for some in sync.some_rows]
    forms = _forms(optimizer) if found else {}
    if not all(_is_same(optimizer, some, forms.get(id(some.of))) for some in found):
        for sync in syncs:
            sync.spread()
        found = []
    with torch.no_grad():
        put = [_put_rows(optimizer, some) for some in found]
    try:
        yield
    finally:
        with torch.no_grad():
            for one in put:
                one.back(optimizer)


def _forms(optimizer: torch.optim.Optimizer) -> Mapping[int, Update | None]:
    """Of each parameter, by id, the form by which rows without a gradient stay as they are."""
    return {
        id(p): resting(member, group)
        for member in members_of(optimizer) for group in member.param_groups
        for p in group["params"]
    }  # fmt: skip


def _is_same(optimizer: torch.optim.Optimizer, some: SomeRows, form: Update | None) -> bool:
    """Whether rows can be stepped alone: all state that they will have is there by row."""
    if not some.of.numel():
        return True
    return form is not None and len(by_row(optimizer, some.of)) == form.copies


def by_row(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns what an optimizer keeps of each row of a parameter, by name."""
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    return {key: x for key, x in state.items() if is_like(x, parameter.data)}


class _Put(NamedTuple):
    """A parameter in whose place an optimizer steps some rows of it, which may be on another
    device."""

    some: SomeRows
    state: Mapping[str, Tensor]
    places: Sequence[tuple[dict[str, Any], int]]
    """Groups of the optimizer that have it, and where."""

    def back(self, optimizer: torch.optim.Optimizer) -> None:
        """It is whole again, with what has been made of the rows."""
        some, rows, kept = self.some, self.some.rows, self.some.kept
        for group, place in self.places:
            group["params"][place] = some.of
        some.of.grad = None
        made = optimizer.state.pop(some.part, {})
        for key in made.keys() - self.state.keys():
            optimizer.state[some.of][key] = made[key]
        stepped = {key: made[key] for key in self.state}
        if kept is not None:
            kept.write(rows, some.part.data, stepped)
            return
        some.of.data.index_copy_(0, rows, some.part.data)
        for key, x in self.state.items():
            x.index_copy_(0, rows, stepped[key])


def _put_rows(optimizer: torch.optim.Optimizer, some: SomeRows) -> _Put:
    state = by_row(optimizer, some.of)
    if some.kept is None:
        rows = {key: x.index_select(0, some.rows) for key, x in state.items()}
    else:
        rows = some.kept.state(some.rows)
    if some.of in optimizer.state:
        optimizer.state[some.part] = {**optimizer.state[some.of], **rows}
    places = [
        (group, place) for group in optimizer.param_groups
        for place, p in enumerate(group["params"]) if p is some.of
    ]  # fmt: skip
    for group, place in places:
        group["params"][place] = some.part
    return _Put(some, state, places)
