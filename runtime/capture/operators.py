"""A tape of operators that keeps the rules of a CUDA graph on a CPU, so that a test sees what
breaks them.

It has every operator below autograd with the memory that it read and wrote. A replay calls them
again on that memory, and nothing else: no Python of the region runs. Then what nobody outside holds
becomes NaN, as memory of a shared pool that another graph has written to.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_modes import recording
from meshwright.ir.torch_private import (
    holders_of,
    is_random,
    leaves,
    map_tensors,
    reads_values,
    schema_arguments,
    storage_key,
    written_arguments,
)


class _Step(NamedTuple):
    """One operator."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kept: list[tuple[int, Tensor]]
    """Of its results those that have memory of their own, with their numbers."""


class OperatorTape:
    """One region, recorded while it runs."""

    def __init__(self, tapes: "WeakSet[OperatorTape] | None" = None) -> None:
        """`tapes`: those of a job that are still there; this one joins them."""
        self._steps: list[_Step] = []
        self._made: dict[int, Tensor] = {}
        """Memory that was made inside, by its key."""
        self._held: Counter[int] = Counter()
        """By its key, how many tensors of this tape look into a memory. Keys are addresses: what is
        counted goes with the tape, as its memory may be another's then."""
        self._tapes = WeakSet() if tapes is None else tapes
        self._tapes.add(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside is on the tape."""
        with recording(self._note):
            yield

    def _note(self, operator: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        if is_random(operator) and _draws(operator, args, kwargs):
            raise PlanError(f"{operator} draws random numbers, which a replay would draw again")
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        if reads_values(operator, masked=any(x.dtype is torch.bool for x in given)):
            raise PlanError(f"the host reads what {operator} finds, and a replay tells it nothing")
        read = set(map(storage_key, given))
        found = [x for x in leaves(result) if isinstance(x, Tensor)]
        own = [(i, x) for i, x in enumerate(found) if storage_key(x) not in read]
        if not own and not written_arguments(operator) and not _sends(operator):
            return  # looks into memory that is there
        args, kwargs = map_tensors(self._alias, (args, kwargs))
        kept = []
        for number, x in own:
            kept.append((number, self._alias(x)))
            self._made.setdefault(storage_key(x), kept[-1][1])
        self._steps.append(_Step(operator, args, kwargs, kept))

    def _alias(self, x: Tensor) -> Tensor:
        """The same memory, in a tensor that only the tape has."""
        self._held[storage_key(x)] += 1
        return x.detach()

    def close(self) -> None:
        """The region is over, and what it made is in the hands of whoever wants it."""
        self._made = {key: x for key, x in self._made.items() if x.is_floating_point()}
        self._forget()

    def _forget(self) -> None:
        """What nobody holds by now is the pool's, also what somebody held before."""
        for key, x in self._made.items():
            if holders_of(x) <= sum(tape._held[key] for tape in self._tapes):
                whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                whole.fill_(float("nan"))

    @torch.no_grad()
    def replay(self) -> None:
        """Does all of it again, in order."""
        under_way: list[Any] = []
        for operator, args, kwargs, kept in self._steps:
            if not _sends(operator):
                _wait(under_way)
            result = operator(*args, **kwargs)
            if _sends(operator):  # what is begun together may only end together
                under_way += [x for x in leaves(result) if hasattr(x, "wait")]
            found = [x for x in leaves(result) if isinstance(x, Tensor)]
            for number, x in kept:
                x.copy_(found[number])
        _wait(under_way)
        self._forget()


def _sends(operator: Any) -> bool:
    """Whether it is a collective, which writes where it is told to."""
    return str(operator.namespace) == "c10d"


def _wait(under_way: list[Any]) -> None:
    """For all messages that are under way."""
    for work in under_way:
        work.wait()
    under_way.clear()


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may draw does: one of attention may drop nothing."""
    chance = {a.name: a.default_value for a in schema_arguments(operator)}
    given = chance | dict(zip(chance, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 1.0))
