"""What makes the parameters of a block whole before it runs, some blocks ahead."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from meshwright.costmodel.ops.overheads import Overheads
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.program import Do, Step, run, talk
from meshwright.forms.exchange_rows import Send

UNPACKED = 2
"""Bytes that move per byte of a flat tensor, out of it."""


class Gathering(Protocol):
    """What it needs to know of a stage."""

    @property
    def prefetch(self) -> int: ...
    @property
    def side_by_side(self) -> bool: ...
    @property
    def overheads(self) -> Overheads: ...
    def send_s(self, group: FormGroup, send: Send, nbytes: float) -> float: ...


class Gathers:
    """Of one group, in a forward or a backward."""

    def __init__(self, stage: Gathering, group: FormGroup, first_job: int) -> None:
        """`first_job`: number of the first block's gather; those of the others follow."""
        self._stage, self._group, self._first = stage, group, first_job

    @property
    def forward(self) -> bool:
        return self._group.exchange.fetches_forward

    @property
    def backward(self) -> bool:
        return self._group.exchange.fetches_backward

    def steps(self, towards: int) -> Sequence[Sequence[Step]]:
        """Returns per block what is done before it; `towards`: where the next one is. In a backward
        that is nothing before blocks that have none."""
        still = self._group.still if towards < 0 else frozenset()
        if self._stage.prefetch and self._group.exchange.fetches_ahead:
            order = [own for own in range(len(self._group.gathered)) if own not in still]
            if towards < 0:
                order.reverse()
            ahead = {own: self._ahead(order, at) for at, own in enumerate(order)}
            return [ahead.get(own, []) for own in range(len(self._group.gathered))]
        if still:
            return [[] if own in still else steps for own, steps in enumerate(self._each_alone)]
        return self._each_alone

    def alone(self, index: int) -> tuple[Step, ...]:
        """Returns what makes one block's parameters whole, and nothing else."""
        return (self._begins[index], *self._waits[index])

    @cached_property
    def _each_alone(self) -> list[list[Step]]:
        """Where nothing is gathered ahead."""
        if self._stage.side_by_side:
            talks = [talk(begins.seconds, "gather") for begins in self._begins]
            return [[own, copies] for own, (_, copies) in zip(talks, self._waits, strict=True)]
        return [[begins, *waits] for begins, waits in zip(self._begins, self._waits, strict=True)]

    @cached_property
    def _begins(self) -> list[Step]:
        """Per block: its gather begins."""
        return [self._begin(own, nbytes) for own, nbytes in enumerate(self._group.gathered)]

    def _begin(self, index: int, nbytes: int) -> Step:
        seconds = self._stage.send_s(self._group, self._group.exchange.fetches[0], nbytes)
        return Step(Do.START, seconds if nbytes else 0.0, self._first + index, "gather")

    @cached_property
    def _waits(self) -> list[tuple[Step, Step]]:
        """Per block: waiting for its parameters, and unpacking them."""
        moved = UNPACKED if self._group.exchange.fetches[0].unpacks else 0
        copy_s = self._stage.overheads.copy_s
        copies = {n: run(copy_s(moved * n), "gather") for n in set(self._group.gathered)}
        return [
            (Step(Do.WAIT, 0.0, self._first + own, "gather"), copies[nbytes])
            for own, nbytes in enumerate(self._group.gathered)
        ]

    def _ahead(self, order: Sequence[int], at: int) -> list[Step]:
        """Make the parameters of a block whole, and then begin with those after it."""
        own, prefetch = order[at], self._stage.prefetch
        found = [*self._waits[own]] if at else [self._begins[own], *self._waits[own]]
        later = order[at + prefetch : at + prefetch + 1] if at else order[1 : prefetch + 1]
        return found + [self._begins[ahead] for ahead in later]
