"""A block on a micro-batch in two halves: one half computes while collectives of the other run.

Merak's sub-pipelined tensor parallelism (arXiv:2206.04959). Forward and backward each take turns at
their own collectives: a half begins one, the other half goes on until it begins one too, and only
then is the first waited for. Phases have graphs of their own, so that backward need not follow the
order of forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.comm import Comm
from meshwright.codegen.segments import Cut, Phase

Turns = Iterator[None]
"""Yields where a collective has begun."""


@dataclass(eq=False)
class _Tape:
    """One half of a micro-batch: values by name, and the results of each phase with their graph."""

    values: dict[str, Any] = field(default_factory=dict)
    made: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Phase -> (result, the leaf that later phases read)."""

    def keep(self, name: str, value: Any, graph: bool) -> Any:
        """The value as later phases read it: a leaf, where it has a gradient."""
        leaf = value
        if isinstance(value, Tensor):
            leaf = value.detach()
            if graph and value.requires_grad:
                leaf.requires_grad_(True)
        self.values[name] = leaf
        return leaf


@dataclass(frozen=True, eq=False)
class Halves:
    """`halves(comm, *params, *inputs)` gives what the block's module gives."""

    cuts: tuple[Cut, Cut]
    """The block's code for the samples of each half."""
    samples: tuple[int, int]
    num_params: int
    splits: tuple[int | None, ...]
    """Per input, the dim with the samples; None if both halves read all of it."""
    joins: tuple[int, ...]
    """The same per output."""

    def __call__(self, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return self.forward(comm, tensors, graph=False)[0]
        apply: Callable[..., tuple[Tensor, ...]] = _Piped.apply
        return apply(self, comm, *tensors)

    def forward(
        self, comm: Comm, tensors: Sequence[Tensor], *, graph: bool
    ) -> tuple[tuple[Tensor, ...], "_Run"]:
        run = _Run(self, comm, tensors, graph)
        return run.forward(), run


class _Run:
    """One micro-batch."""

    def __init__(self, halves: Halves, comm: Comm, tensors: Sequence[Tensor], graph: bool) -> None:
        self.halves, self.comm, self.graph = halves, comm, graph
        self.offset = comm.sample_offset
        self.shared, self.tapes = _Tape(), (_Tape(), _Tape())
        self.params = tensors[: halves.num_params]
        self._enter(tensors[halves.num_params :])

    def _enter(self, inputs: Sequence[Tensor]) -> None:
        names = self.halves.cuts[0].arguments
        self.shared.values |= dict(zip(names, self.params, strict=False))
        for name, x, dim in zip(
            names[self.halves.num_params :], inputs, self.halves.splits, strict=True
        ):
            for tape, part in zip(self.tapes, self._parts(x, dim), strict=True):
                leaf = part.detach()
                tape.values[name] = leaf.requires_grad_(self.graph and x.requires_grad)

    def _parts(self, x: Tensor, dim: int | None) -> tuple[Tensor, ...]:
        if dim is None:
            return x, x
        per_sample = x.shape[dim] // sum(self.halves.samples)
        return torch.split_with_sizes(x, [n * per_sample for n in self.halves.samples], dim)

    def _take_turns(self, turns: Sequence[tuple[int, Turns]]) -> None:
        """One half after the other, each as far as its next collective."""
        left = list(turns)
        while left:
            for half in list(left):
                self.comm.sample_offset = self.offset + half[0] * self.halves.samples[0]
                if next(half[1], True):
                    left.remove(half)
        self.comm.sample_offset = self.offset

    # Forward.

    def forward(self) -> tuple[Tensor, ...]:
        cuts = self.halves.cuts
        self._compute(cuts[0].phases[0], 0, self.shared)
        for tape in self.tapes:
            tape.values = self.shared.values | tape.values
        self._take_turns([(i, self._forward(cuts[i], self.tapes[i])) for i in (0, 1)])
        return tuple(
            torch.cat([tape.values[name].detach() for tape in self.tapes], dim)
            for name, dim in zip(cuts[0].results, self.halves.joins, strict=True)
        )

    def _forward(self, cut: Cut, tape: _Tape) -> Turns:
        for number, phase in enumerate(cut.phases[1:], 1):
            self._compute(phase, number, tape)
            begun = []
            for moved in phase.moves:
                move = self.comm.move(moved.method, moved.axis, *moved.where, **moved.more)
                x = tape.values[moved.source]
                begun.append((moved, x, self.comm.begin_forward(move, x.detach())))
            if any(moved.sends_forward for moved in phase.moves):
                yield
            for moved, x, arrive in begun:
                result = arrive().detach()
                tape.values[moved.made] = result.requires_grad_(self.graph and x.requires_grad)

    def _compute(self, phase: Phase, number: int, tape: _Tape) -> None:
        given = [tape.values[name] for name in phase.reads]
        with torch.set_grad_enabled(self.graph):
            results = phase.code(self.comm, *given)
        kept = []
        for name, result in zip(phase.made, results, strict=True):
            leaf = tape.keep(name, result, self.graph)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                kept.append((result, leaf))
        tape.made[number] = kept

    # Backward.

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs; those of parameters are added to theirs."""
        cuts = self.halves.cuts
        found = zip(cuts[0].results, gradients, self.halves.joins, strict=True)
        for name, gradient, dim in found:
            for tape, part in zip(self.tapes, self._parts(gradient, dim), strict=True):
                _add(tape.values[name], part)
        self._take_turns([(i, self._backward(cuts[i], self.tapes[i])) for i in (1, 0)])
        _run_backward(self.shared.made.pop(0))
        names = cuts[0].arguments[self.halves.num_params :]
        splits = self.halves.splits
        return [self._gradient(name, dim) for name, dim in zip(names, splits, strict=True)]

    def _backward(self, cut: Cut, tape: _Tape) -> Turns:
        for number in range(len(cut.phases) - 1, 0, -1):
            begun = []
            for moved in cut.phases[number].moves:
                leaf = tape.values.pop(moved.made)
                if leaf.grad is not None:
                    move = self.comm.move(moved.method, moved.axis, *moved.where, **moved.more)
                    begun.append((moved, self.comm.begin_backward(move, leaf.grad)))
            if any(moved.sends_backward for moved, _ in begun):
                yield
            for moved, arrive in begun:
                _add(tape.values[moved.source], arrive())
            _run_backward(tape.made.pop(number))

    def _gradient(self, name: str, dim: int | None) -> Tensor | None:
        leaves = [tape.values[name] for tape in self.tapes]
        if not leaves[0].requires_grad:
            return None
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return found[0] + found[1] if dim is None else torch.cat(found, dim)


def _add(leaf: Tensor, gradient: Tensor) -> None:
    if leaf.requires_grad:
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _run_backward(made: Sequence[tuple[Tensor, Tensor]]) -> None:
    pairs = [(result, leaf.grad) for result, leaf in made if leaf.grad is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


class _Piped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Halves, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, ctx.run = halves.forward(comm, tensors, graph=True)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        run = ctx.run
        ctx.run = None
        found = run.backward(gradients)
        return (None, None, *[None] * len(run.params), *found)
