"""A block on a micro-batch in two halves: one half computes while collectives of the other run.

Merak's sub-pipelined tensor parallelism (arXiv:2206.04959). Forward and backward each take turns at
their own collectives: a half begins one, the other half goes on until it begins one too, and only
then is the first waited for. Phases have graphs of their own, so that backward need not follow the
order of forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.passes.segments import Phase, Phases
from meshwright.ir.torch_private import run_backward

Turns = Iterator[None]
"""Yields where a collective has begun."""


@dataclass(eq=False)
class _HalfTape:
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

    cuts: tuple[Phases, Phases]
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
    ) -> tuple[tuple[Tensor, ...], "HalvesRun"]:
        inputs = tensors[self.num_params :]
        parts = [self.entering(x, i, graph=graph) for i, x in enumerate(inputs)]
        run = HalvesRun(self, comm, tensors[: self.num_params], graph)
        turns = {half: run.forward(half, [part[half] for part in parts]) for half in (0, 1)}
        take_turns(comm, self.samples[0], turns)
        joined = (torch.cat([run.results(half)[i].detach() for half in (0, 1)], dim)
                  for i, dim in enumerate(self.joins))  # fmt: skip
        return tuple(joined), run

    def entering(self, x: Tensor, index: int, *, graph: bool) -> list[Tensor]:
        """Input `index` as each half reads it: a leaf."""
        parts = self.parts(x, self.splits[index])
        return [part.detach().requires_grad_(graph and x.requires_grad) for part in parts]

    def parts(self, x: Tensor, dim: int | None) -> tuple[Tensor, ...]:
        """A value of the micro-batch as the halves have it."""
        if dim is None:
            return x, x
        per_sample = x.shape[dim] // sum(self.samples)
        return torch.split_with_sizes(x, [n * per_sample for n in self.samples], dim)


def take_turns(comm: Comm, first: int, turns: Mapping[int, Turns]) -> None:
    """One half after the other, each as far as its next collective. `first`: samples of half 0."""
    offset, left = comm.sample_offset, dict(turns)
    while left:
        for half, turn in list(left.items()):
            comm.sample_offset = offset + half * first
            if next(turn, True):
                del left[half]
    comm.sample_offset = offset


def gradient(leaves: Sequence[Tensor], dim: int | None) -> Tensor | None:
    """That of a value of which the halves have read these leaves."""
    if not leaves[0].requires_grad:
        return None
    found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return found[0] + found[1] if dim is None else torch.cat(found, dim)


def add(leaf: Tensor, more: Tensor) -> None:
    """Adds to the gradient of a leaf."""
    if leaf.requires_grad:
        leaf.grad = more if leaf.grad is None else leaf.grad + more


class HalvesRun:
    """A block on the halves of one micro-batch."""

    def __init__(self, halves: Halves, comm: Comm, params: Sequence[Tensor], graph: bool) -> None:
        self.halves, self.comm, self.graph = halves, comm, graph
        self.shared, self.tapes = _HalfTape(), (_HalfTape(), _HalfTape())
        self.params = params
        self.shared.values |= dict(zip(halves.cuts[0].arguments, params, strict=False))

    def results(self, half: int) -> list[Tensor]:
        """Of a half that is through, as leaves."""
        return [self.tapes[half].values[name] for name in self.halves.cuts[0].results]

    # Forward.

    def forward(self, half: int, inputs: Sequence[Tensor]) -> Turns:
        """Computes a half from its inputs, which are leaves."""
        cut, tape = self.halves.cuts[half], self.tapes[half]
        names = self.halves.cuts[0].arguments[self.halves.num_params :]
        if 0 not in self.shared.made:
            self._compute(self.halves.cuts[0].phases[0], 0, self.shared)
        tape.values = self.shared.values | dict(zip(names, inputs, strict=True))
        for number, phase in enumerate(cut.phases[1:], 1):
            self._compute(phase, number, tape)
            begun = []
            for moved in phase.moves:
                x = tape.values[moved.source]
                begun.append((moved, x, moved.begin(self.comm, tape.values)))
            if any(moved.sends_forward for moved in phase.moves):
                yield
            for moved, x, arrive in begun:
                result = arrive().detach()
                tape.values[moved.made] = result.requires_grad_(self.graph and x.requires_grad)

    def _compute(self, phase: Phase, number: int, tape: _HalfTape) -> None:
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

    def backward(self, half: int) -> Turns:
        """From the gradients of a half's results to those of its inputs; those of parameters are
        added to theirs."""
        cut, tape = self.halves.cuts[half], self.tapes[half]
        for number in range(len(cut.phases) - 1, 0, -1):
            begun = []
            for moved in cut.phases[number].moves:
                leaf = tape.values.pop(moved.made)
                if leaf.grad is not None:
                    begun.append((moved, moved.begin_back(self.comm, tape.values, leaf.grad)))
            if any(moved.sends_backward for moved, _ in begun):
                yield
            for moved, arrive in begun:
                add(tape.values[moved.source], arrive())
            _run_backward(tape.made.pop(number))

    def finish(self) -> None:
        """The rest of the backward, when both halves are through."""
        _run_backward(self.shared.made.pop(0))


def _run_backward(made: Sequence[tuple[Tensor, Tensor]]) -> None:
    pairs = [(result, leaf.grad) for result, leaf in made if leaf.grad is not None]
    if pairs:
        run_backward([x for x, _ in pairs], [g for _, g in pairs])


class _Piped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Halves, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, ctx.run = halves.forward(comm, tensors, graph=True)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        run: HalvesRun = ctx.run
        ctx.run = None
        halves, tapes = run.halves, run.tapes
        for i, (whole, dim) in enumerate(zip(gradients, halves.joins, strict=True)):
            for half, part in enumerate(halves.parts(whole, dim)):
                add(run.results(half)[i], part)
        take_turns(run.comm, halves.samples[0], {half: run.backward(half) for half in (1, 0)})
        run.finish()
        names = halves.cuts[0].arguments[halves.num_params :]
        found = [
            gradient([tape.values[name] for tape in tapes], dim)
            for name, dim in zip(names, halves.splits, strict=True)
        ]
        return (None, None, *[None] * len(run.params), *found)
