"""The batch after the one that a step takes, for plans that work ahead with it, in others' loops.

Batches are read one ahead only where a form of the plan makes use of the next one.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import leaves, map_tensors


class BatchGroups:
    """Takes batches from an iterator by the group, and one more that the next group begins with."""

    def __init__(self) -> None:
        self._read: list[Any] = []
        self._source: Iterator[Any] | None = None
        self._following: deque[Any] = deque()

    def take(self, source: Iterator[Any], count: int, ahead: bool) -> list[Any]:
        """Returns `count` batches of `source`, or what is left of it; `ahead`: reads one more."""
        if source is not self._source:  # of an epoch that was broken off one may be left
            self._read, self._source = [], source
        found = list(islice(chain(self._read, source), count))
        self._read = list(islice(source, 1)) if ahead else []
        self._following = deque([*found[1:], *self._read])
        return found

    def after(self) -> Any | None:
        """Returns what follows the first batch of the group, at the next call the second, and so
        on; None after the last that was read."""
        return self._following.popleft() if self._following else None


@dataclass(frozen=True)
class _Read:
    batch: Any
    following: Any | None


class LoaderAhead:
    """Stands for a loader, reads it one ahead, and knows of each batch which one follows."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._reads: deque[_Read] = deque()
        self._place: Any = None
        """The loader's state before the batch that was read ahead."""

    def __iter__(self) -> Iterator[Any]:
        self._reads.clear()
        source, nothing = iter(self._loader), object()
        batch = next(source, nothing)
        while batch is not nothing:
            self._place = self._placed()
            following = next(source, nothing)
            self._reads.append(_Read(batch, None if following is nothing else following))
            yield batch
            batch = following
        self._place = None

    def _placed(self) -> Any:
        """What a checkpoint keeps of the loader."""
        return None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def after(self, batch: Any) -> Any | None:
        """Returns the batch that follows one that was given; None if there is none, or `batch` is
        another one."""
        while self._reads:
            read = self._reads.popleft()
            if read.batch is batch:
                return read.following
        return None


class PlacedLoaderAhead(LoaderAhead):
    """The same of a loader that checkpoints keep the place of: that of the batch last given."""

    def _placed(self) -> Any:
        return self._loader.state_dict()

    def state_dict(self) -> Any:
        return self._placed() if self._place is None else self._place

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)


def read_ahead(loader: Any) -> LoaderAhead:
    """Returns what stands for a loader and reads it one ahead."""
    return (PlacedLoaderAhead if hasattr(loader, "state_dict") else LoaderAhead)(loader)


class NextInputs:
    """What a step will give its model next, by what it does with the loader's batches."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._following: Any = None
        self._promised: tuple[Any, list[Any]] | None = None

    def step(self, batch: Any, following: Any | None) -> None:
        """A step begins with a batch of the loader, which `following` comes after."""
        self._batch, self._following = batch, following

    def after(self, inputs: Any) -> Any | None:
        """Returns what the step will make of the following batch, as it has made `inputs` of this
        one; None where these are not the batch's own tensors, in any order.

        PlanError if the step before was to be followed by other inputs.
        """
        if self._promised is not None and self._promised[0] is self._batch:
            if not _same(leaves(inputs), self._promised[1]):
                raise PlanError(
                    "a step gives its model other tensors of a batch than the step before: a form "
                    "of the plan works ahead with the next batch, and cannot know which"
                )
        self._promised = None
        if self._following is None:
            return None
        theirs = leaves(self._following)
        places = {id(x): i for i, x in enumerate(leaves(self._batch)) if isinstance(x, Tensor)}
        if not all(places.get(id(x), len(theirs)) < len(theirs) for x in leaves(inputs)):
            return None
        found = map_tensors(lambda x: theirs[places[id(x)]], inputs)
        self._promised = self._following, leaves(found)
        return found


def _same(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))
