"""Sums over ranks that are on their way, added up as they come."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from meshwright.ir.comm.p2p_collectives import Waitable

Key = TypeVar("Key", bound=Hashable)


class ArrivingSums(Generic[Key]):
    """A rank's parts of sums, by key; a key that comes several times in a step is added up."""

    def __init__(self) -> None:
        self._works: list[tuple[Key, Tensor, Waitable]] = []
        self._sums: dict[Key, Tensor] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sums or any(key == sent for sent, _, _ in self._works)

    def clear(self) -> None:
        """Forgets what has come."""
        self._sums.clear()

    def send(self, key: Key, flat: Tensor, work: Waitable) -> None:
        """Notes that `flat` has its sum once the work is done."""
        self._works.append((key, flat, work))

    def collect(self, keep: int) -> None:
        """Adds up what has arrived, all but the newest `keep`, which may still be on its way."""
        while len(self._works) > keep:
            key, flat, work = self._works.pop(0)
            work.wait()
            if key in self._sums:
                self._sums[key] += flat
            else:
                self._sums[key] = flat

    def take(self) -> Iterator[tuple[Key, Tensor]]:
        """Yields what has come, in the order in which it came first, and forgets it one by one."""
        for key in list(self._sums):
            yield key, self._sums.pop(key)
