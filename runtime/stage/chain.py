"""A run of blocks on the two halves of a micro-batch, across their borders: a half goes on to the
next block while the last collective of the other is on its way. Or a block on all its samples,
beside which another micro-batch is at work.

A block's parameters are there from when the first half enters it until the second has left it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call, StageProgram
from meshwright.codegen.passes.halves import (
    Halves,
    HalvesRun,
    Turns,
    add,
    gradient,
    take_turns,
    within,
)
from meshwright.runtime.stage.kept_halves import HalvesKeeper


class Gate(NamedTuple):
    """What a stage does around the blocks of a chain, by the number of the call."""

    enter: Callable[[int], None]
    """The block's parameters are about to be read."""
    leave: Callable[[int], None]
    """They have been read."""
    passed: Callable[[int], None]
    """Its backward is over."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainBlock:
    """A block of a chain."""

    index: int
    """Of the stage's calls."""
    call: Call
    tensors: Sequence[Tensor]
    """Its parameters."""
    again: bool
    """Whether it keeps its inputs only, and runs again for its backward."""
    keeper: HalvesKeeper | None = None
    """Where the plan says of its ops what becomes of what they make."""

    @property
    def halves(self) -> Halves:
        found = self.call.code.halves
        assert found is not None
        return found


def chains_of(program: StageProgram) -> dict[int, range]:
    """First call -> the calls of each run of several that go on from one to the next; in a stage
    that works beside others, each call that waits for something."""
    if program.paired:
        cut = [i for i, call in enumerate(program.calls) if call.code.halves]
        return {index: range(index, index + 1) for index in cut}
    found: dict[int, range] = {}
    first = 0
    for index, call in enumerate(program.calls):
        if not call.follows:
            first = index
        else:
            found[first] = range(first, index + 1)
    return found


class Chain:
    """One micro-batch in a run of blocks, from its forward to the end of its backward."""

    def __init__(
        self,
        links: Sequence[ChainBlock],
        comm: Comm,
        gate: Gate,
        casts: Callable[[], AbstractContextManager[None]],
        *,
        keep: bool,
    ) -> None:
        self._links, self._comm, self._gate, self._casts = links, comm, gate, casts
        self._keep = keep
        self._parts: dict[str, list[Tensor]] = {}
        """Value -> the leaves of the halves."""
        self._dims: dict[str, int | None] = {}
        """Where samples are in what enters and in what is made."""
        self._entered: list[str] = []
        self._runs: dict[int, HalvesRun] = {}
        self._left: dict[int, int] = {}
        """Blocks that one half has left, and the other has not."""
        self._entered_back: set[int] = set()
        """Blocks whose backward has begun."""
        self._wanted: frozenset[str] = frozenset()
        self._offset = comm.sample_offset
        self._halves = range(len(links[0].halves.cuts))

    # Forward.

    def forward(self, values: Mapping[str, Tensor], wanted: Iterable[str]) -> Turns:
        """Makes what `made` returns then: those of `wanted` that its blocks make."""
        self._wanted = frozenset(wanted)
        self._enter(values)
        if len(self._halves) == 1:
            yield from within(self._casts, self._forward(0))
            return
        with self._casts():
            self._take_turns({half: self._forward(half) for half in self._halves})

    def made(self) -> dict[str, Tensor]:
        """What is wanted of it, whole and without a graph."""
        found = {}
        outputs = (name for link in self._links for name in link.call.outputs)
        # What enters stays what it was: its gradient is that of a leaf of the stage.
        for name in (name for name in outputs if name in self._wanted and name in self._parts):
            parts, dim = [part.detach() for part in self._parts[name]], self._dims[name]
            assert dim is not None
            found[name] = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        return found

    def dtype(self, name: str) -> torch.dtype:
        """Of a value that its blocks make."""
        return self._parts[name][0].dtype

    def differs(self, name: str) -> bool:
        """Whether a value has a gradient."""
        return self._parts[name][0].requires_grad

    def _enter(self, values: Mapping[str, Tensor]) -> None:
        made: set[str] = set()
        for link in self._links:
            for i, name in enumerate(link.call.inputs):
                if name not in made and name not in self._parts:
                    leaves = link.halves.entering(values[name], i, graph=self._keep)
                    self._parts[name], self._dims[name] = leaves, link.halves.splits[i]
                    self._entered.append(name)
            made.update(link.call.outputs)
            self._dims |= dict(zip(link.call.outputs, link.halves.joins, strict=True))

    def _take_turns(self, turns: Mapping[int, Turns]) -> None:
        take_turns(self._comm, self._links[0].halves.samples[0], turns)

    def _forward(self, half: int) -> Turns:
        for link in self._links:
            if link.index not in self._runs:
                self._gate.enter(link.index)
                graph = self._keep and not link.again
                watched = link.keeper.watched if link.keeper else None
                self._runs[link.index] = HalvesRun(
                    link.halves, self._comm, link.tensors, graph, watched
                )
            run = self._runs[link.index]
            yield from self._named(link, run.forward(half, self._inputs(link, half)))
            differs = self._keep and link.again and self._has_gradient(link, half)
            for name, leaf in zip(link.call.outputs, run.results(half), strict=True):
                if differs and (leaf.is_floating_point() or leaf.is_complex()):
                    leaf.requires_grad_(True)
                self._parts.setdefault(name, []).append(leaf)
            if self._is_through(link):
                if link.keeper:
                    link.keeper.settle()
                self._gate.leave(link.index)
                self._forget(link)

    def _inputs(self, link: ChainBlock, half: int) -> list[Tensor]:
        return [self._parts[name][half] for name in link.call.inputs]

    def _has_gradient(self, link: ChainBlock, half: int) -> bool:
        """Whether what a block makes without a graph will have one."""
        return any(x.requires_grad for x in (*link.tensors, *self._inputs(link, half)))

    def _named(self, link: ChainBlock, turns: Turns) -> Turns:
        """The turns of a half in a block, on whose name the masks of dropout depend."""
        self._comm.block = link.call.block
        for _ in turns:
            yield
            self._comm.block = link.call.block

    def _is_through(self, link: ChainBlock) -> bool:
        """Whether the half that leaves a block is the last to do so."""
        if len(self._halves) == 1:
            return True
        left = self._left.pop(link.index, 0)
        if not left:
            self._left[link.index] = 1
        return bool(left)

    def _forget(self, link: ChainBlock) -> None:
        """Lets go of what no backward will need."""
        if link.again or not self._keep:
            del self._runs[link.index]
        for name in link.call.drop if not self._keep else ():
            if name not in self._wanted:
                self._parts.pop(name, None)

    # Backward.

    def recompute(self) -> None:
        """Makes again what the forward did not keep; the backward need not."""
        for link in self._links:
            lacks = link.again and link.index not in self._runs
            if lacks or (link.keeper and link.keeper.runs_again):
                self._gate.enter(link.index)
                self._prepare(link)
                self._gate.leave(link.index)

    def _prepare(self, link: ChainBlock) -> None:
        """Makes what the backward of a block needs, where it is not there."""
        # The halves are under way already: what one of them has begun goes on beside this.
        offset, self._comm.sample_offset = self._comm.sample_offset, self._offset
        try:
            if link.keeper:
                link.keeper.prepare(self._comm, self._casts)
            elif link.index not in self._runs:
                for _ in self._remake(link):
                    pass
        finally:
            self._comm.sample_offset = offset

    def _remake(self, link: ChainBlock) -> Turns:
        run = self._runs[link.index] = HalvesRun(link.halves, self._comm, link.tensors, graph=True)
        turns = {half: run.forward(half, self._inputs(link, half)) for half in self._halves}
        again = partial(self._again, link)
        if len(turns) == 1:
            yield from within(again, turns[0])
        else:
            with again():
                self._take_turns(turns)
        for half in self._halves:
            run.results(half)  # the blocks after it have had them

    @contextmanager
    def _again(self, link: ChainBlock) -> Iterator[None]:
        """Inside, a block runs once more."""
        self._comm.block, self._comm.recomputing = link.call.block, True
        try:
            with self._casts():
                yield
        finally:
            self._comm.recomputing = False

    def backward(self, gradients: Mapping[str, Tensor], gate: Gate) -> Turns:
        """Makes what `entering` returns then, from the gradients of what its blocks made; those of
        parameters are added to theirs."""
        self._gate, self._offset = gate, self._comm.sample_offset
        for name, whole in gradients.items():
            parts = self._links[0].halves.parts(whole, self._dims[name])
            for leaf, part in zip(self._parts[name], parts, strict=True):
                add(leaf, part.clone())
        if len(self._halves) == 1:
            yield from self._backward(0)
        else:
            self._take_turns({half: self._backward(half) for half in (1, 0)})

    def entering(self) -> dict[str, Tensor]:
        """The gradients of what entered."""
        found = {name: gradient(self._parts[name], self._dims[name]) for name in self._entered}
        return {name: grad for name, grad in found.items() if grad is not None}

    def _backward(self, half: int) -> Turns:
        for number, link in reversed(list(enumerate(self._links))):
            if link.index not in self._entered_back:
                self._entered_back.add(link.index)
                self._gate.enter(link.index)
                if len(self._halves) == 1 and not link.keeper and link.index not in self._runs:
                    yield from self._remake(link)
                else:
                    self._prepare(link)
                following = self._links[number - 1].keeper if number else None
                if following:
                    following.fetch()
            run = self._runs[link.index]
            for index, name in enumerate(link.call.outputs):
                leaf = self._parts[name][half]
                if leaf.grad is not None:
                    run.give(half, index, leaf.grad)
            yield from self._named(link, run.backward(half))
            if self._is_through(link):
                run.finish()
                self._gate.leave(link.index)
                del self._runs[link.index]
                for name in link.call.outputs:
                    del self._parts[name]
                self._gate.passed(link.index)
