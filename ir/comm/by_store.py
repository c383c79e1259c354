"""What the processes of a job tell each other on the host, through the store in which they met.

A process group for that would have a connection from each rank to each other one: 16,383 per
process in a job of 16,384. Here a rank writes what it says under a key of its own, the first rank
reads all of them and writes one answer, which the others read and confirm: some operations of the
store per rank, and no connection that is not there already. The first rank goes on when all have
read, as the store may be its own and go with it, and leaves no key behind.
"""

import pickle
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.ir.torch_private import job_store, store_of

T = TypeVar("T")

OPERATIONS_PER_RANK = 5
"""Of the store, for a value of every rank on every rank: to write it, to read the answer and to
confirm that; and of the first rank to read it and to take it away."""
_PREFIX = "meshwright/told"
_ASIDE = "aside"
_turns: dict[str, int] = defaultdict(int)
"""Group -> exchanges so far: the same on all of its ranks. Never begun anew, as the store may
outlive a group."""
_asides = count()


class Aside:
    """What all ranks of the job tell each other on a thread beside the main one: every rank makes
    one at the same time, and its exchanges are counted apart. Over a connection of its own, since
    whoever waits for an answer holds his."""

    def __init__(self) -> None:
        self.store, self.name = job_store(), f"{_ASIDE}{next(_asides)}"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()


Among = dist.ProcessGroup | Aside | None
"""Between whom an exchange is; None: all ranks, on their main threads."""


def from_first(value: Any) -> Any:
    """Rank 0's value on every rank; all call it."""
    if _is_alone(None):
        return value
    return _Turn(None).answered(lambda: value)


def of_all(value: Any, among: Among = None) -> list[Any]:
    """Every rank's value on every rank of a group, or of the job; all of them call it."""
    return judged(value, list, among)


def judged(value: Any, judge: Callable[[Sequence[Any]], T], among: Among = None) -> T:
    """What the first rank makes of all ranks' values, on every rank; all call it. `judge` must not
    raise: the others would wait for it."""
    if _is_alone(among):
        return judge([value])
    turn = _Turn(among)
    turn.say(value)
    return turn.answered(lambda: judge(turn.heard()))


def to_first(value: Any, among: Aside | None = None) -> list[Any]:
    """Every rank's value on rank 0, and nothing on the others; all call it."""
    if _is_alone(among):
        return [value]
    turn = _Turn(among)
    turn.say(value)
    return turn.heard() if turn.is_first else []


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Returns when all ranks of the group have called it."""
    judged(None, lambda _: None, group)


def _is_alone(among: Among) -> bool:
    if isinstance(among, Aside):
        return among.size == 1
    return not dist.is_initialized() or dist.get_world_size(among) == 1


class _Turn:
    """One exchange."""

    def __init__(self, among: Among) -> None:
        if isinstance(among, Aside):
            self._store, name, prefix = among.store, among.name, f"{_PREFIX}/{among.name}"
            self._rank, self._size = among.rank, among.size
        else:
            (self._store, name), prefix = store_of(among), _PREFIX
            self._rank, self._size = dist.get_rank(among), dist.get_world_size(among)
        self._key = f"{prefix}/{_turns[name]}"
        _turns[name] += 1
        self.is_first = self._rank == 0

    def say(self, value: Any) -> None:
        """Writes this rank's value, for the first one to hear."""
        if not self.is_first:
            self._store.set(f"{self._key}/{self._rank}", pickle.dumps(value))
        self._own = value

    def heard(self) -> list[Any]:
        """All ranks' values, on the first one."""
        keys = [f"{self._key}/{rank}" for rank in range(1, self._size)]
        if self._store.has_extended_api():
            found = self._read(self._store.multi_get, keys)
        else:
            found = [self._read(self._store.get, key) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [self._own, *map(pickle.loads, found)]

    def answered(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all, once all have it."""
        answer, read, done = (f"{self._key}/{name}" for name in ("answer", "read", "done"))
        if self.is_first:
            made = make()
            self._store.set(answer, _packed(made))
            self._read(self._store.get, done)
            for key in (answer, read, done):
                self._store.delete_key(key)
            return made
        heard: T = _unpacked(self._read(self._store.get, answer))
        if self._store.add(read, 1) == self._size - 1:
            self._store.set(done, "")
        return heard

    def _read(self, read: Callable[[Any], Any], what: Any) -> Any:
        try:
            return read(what)
        except RuntimeError as error:
            if "imeout" not in str(error):  # the store has gone, say: nothing more can be asked
                raise
            keys = [what] if isinstance(what, str) else what
            late = [key.rsplit("/", 1)[1] for key in keys if not self._store.check([key])]
            whom = {"answer": "rank 0", "done": "all ranks"}
            names = ", ".join(whom.get(name, f"rank {name}") for name in late[:8])
            raise dist.DistStoreError(
                f"timed out: rank {self._rank} of {self._size} waits for {names} in an exchange "
                f"that all ranks take part in; {error}"
            ) from error


def _packed(value: Any) -> bytes:
    """Short where many ranks said the same, as a list goes to all of them."""
    if not isinstance(value, list) or len(value) < 2:
        return pickle.dumps((value, None))
    each = [pickle.dumps(one) for one in value]
    different = list(dict.fromkeys(each))
    at = {one: number for number, one in enumerate(different)}
    order = array("L", map(at.__getitem__, each)).tobytes()
    return pickle.dumps((different, zlib.compress(order)))


def _unpacked(data: bytes) -> Any:
    value, order = pickle.loads(data)
    if order is None:
        return value
    return [pickle.loads(value[at]) for at in array("L", zlib.decompress(order))]
