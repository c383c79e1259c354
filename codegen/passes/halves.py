"""A block on a micro-batch in two halves: one half computes while collectives of the other run.

Merak's sub-pipelined tensor parallelism (arXiv:2206.04959). Forward and backward each take turns at
their own collectives: a half begins one, the other half goes on until it begins one too, and only
then is the first waited for. Phases have graphs of their own, so that backward need not follow the
order of forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.passes.segments import Moved, Phase, Phases
from meshwright.codegen.sharded.later import Later, put_off
from meshwright.ir.torch_private import run_backward

Turns = Iterator[None]
"""Yields where a collective has begun."""


class PhaseRunner(Protocol):
    """Runs the phases of a half in another way than their code does."""

    def begin(self, comm: Comm, values: Mapping[str, Any]) -> None:
        """The half begins with these values."""
        ...

    def run(self, phase: Phase, given: Mapping[str, Any]) -> Sequence[Any]:
        """What the phase makes of what it reads."""
        ...

    def arrived(self, moved: Moved, values: Mapping[str, Any], *, differs: bool) -> None:
        """Something has been moved, which has a gradient or not; `values` have what was there, and
        what came of it."""
        ...


Watched = tuple[PhaseRunner, ...]
"""Who runs the phases of each half."""


@dataclass(eq=False, slots=True)
class _Slot:
    """Where the gradient of a value that later phases read is added up."""

    gradient: Tensor | None = None

    def add(self, more: Tensor) -> None:
        self.gradient = more if self.gradient is None else self.gradient + more


class _Entry(torch.autograd.Function):
    """A value of an earlier phase where the graph of one begins. A leaf's graph would keep its
    memory until the backward; this one keeps what the ops that read it ask for."""

    @staticmethod
    def forward(ctx: Any, begins: Tensor, value: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.slot.add(gradients[0])
        return None, None, None


def _entry(value: Tensor, slot: _Slot) -> Tensor:
    begins = torch.empty(0, requires_grad=True, device=value.device)
    apply: Callable[..., Tensor] = _Entry.apply
    with torch.enable_grad():
        return apply(begins, value, slot)


@dataclass(eq=False)
class _HalfTape:
    """One half of a micro-batch."""

    values: dict[str, Any] = field(default_factory=dict)
    """By name; those that phases make, until no later one reads them."""
    slots: dict[str, _Slot] = field(default_factory=dict)
    """Of the values that have a gradient."""
    made: dict[int, list[tuple[GradientEdge, _Slot]]] = field(default_factory=dict)
    """Phase, or minus the number of one for what is beside its moves -> where the graph of each
    result ends, and its gradient."""
    later: Later = field(default_factory=Later)
    """Gradients of weights that are put off until something is on its way."""

    def keep(self, name: str, value: Any, *, differs: bool) -> None:
        """A value that later phases read."""
        self.values[name] = value.detach() if isinstance(value, Tensor) else value
        if differs:
            self.slots[name] = _Slot()

    def read(self, name: str, *, graph: bool) -> Any:
        """A value as a phase reads it: with a graph, its gradient is added to that of the value."""
        value, slot = self.values[name], self.slots.get(name)
        return _entry(value, slot) if graph and slot else value

    def differs(self, name: str) -> bool:
        """Whether a value has a gradient."""
        return name in self.slots or self.values[name].requires_grad

    def add(self, name: str, more: Tensor) -> None:
        """Adds to the gradient of a value: one that a phase has made, or what entered."""
        if name in self.slots:
            self.slots[name].add(more)
        else:
            add(self.values[name], more)


@dataclass(frozen=True, eq=False)
class Halves:
    """`halves(comm, *params, *inputs)` gives what the block's module gives."""

    cuts: tuple[Phases, ...]
    """The block's code for the samples of each half; once where all samples go together, and what
    is moved has other work of theirs beside it."""
    samples: tuple[int, ...]
    """Of a rank, in each half."""
    num_params: int
    splits: tuple[int | None, ...]
    """Per input, the dim with the samples; None if both halves read all of it."""
    joins: tuple[int, ...]
    """The same per output."""

    def __call__(
        self, comm: Comm, *tensors: Tensor, watched: Watched | None = None
    ) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return self.forward(comm, tensors, graph=False)[0]
        apply: Callable[..., tuple[Tensor, ...]] = _Piped.apply
        return apply(self, comm, watched, *tensors)

    def forward(
        self,
        comm: Comm,
        tensors: Sequence[Tensor],
        *,
        graph: bool,
        watched: Watched | None = None,
    ) -> tuple[tuple[Tensor, ...], "HalvesRun"]:
        inputs = tensors[self.num_params :]
        parts = [self.entering(x, i, graph=graph) for i, x in enumerate(inputs)]
        run = HalvesRun(self, comm, tensors[: self.num_params], graph, watched)
        each = range(len(self.cuts))
        turns = {half: run.forward(half, [part[half] for part in parts]) for half in each}
        take_turns(comm, self.samples[0], turns)
        results = [run.results(half) for half in each]
        if len(results) == 1:
            return tuple(x.detach() for x in results[0]), run
        joined = (torch.cat([both[i].detach() for both in results], dim)
                  for i, dim in enumerate(self.joins))  # fmt: skip
        return tuple(joined), run

    def entering(self, x: Tensor, index: int, *, graph: bool) -> list[Tensor]:
        """Input `index` as each half reads it: a leaf."""
        parts = self.parts(x, self.splits[index])
        return [part.detach().requires_grad_(graph and x.requires_grad) for part in parts]

    def parts(self, x: Tensor, dim: int | None) -> tuple[Tensor, ...]:
        """A value of the micro-batch as the halves have it."""
        if dim is None or len(self.samples) == 1:
            return (x,) * len(self.samples)
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


def within(context: Callable[[], AbstractContextManager[None]], turns: Turns) -> Turns:
    """Turns each of which is taken inside a context that nobody else's is in."""
    while True:
        with context():
            over = next(turns, True)
        if over:
            return
        yield


def gradient(leaves: Sequence[Tensor], dim: int | None) -> Tensor | None:
    """That of a value of which the halves have read these leaves."""
    if not leaves[0].requires_grad:
        return None
    found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    if len(found) == 1:
        return found[0]
    return found[0] + found[1] if dim is None else torch.cat(found, dim)


def add(leaf: Tensor, more: Tensor) -> None:
    """Adds to the gradient of a leaf."""
    if leaf.requires_grad:
        leaf.grad = more if leaf.grad is None else leaf.grad + more


class HalvesRun:
    """A block on the halves of one micro-batch."""

    def __init__(
        self,
        halves: Halves,
        comm: Comm,
        params: Sequence[Tensor],
        graph: bool,
        watched: Watched | None = None,
    ) -> None:
        self.halves, self.comm, self.graph = halves, comm, graph
        self.shared, self.tapes = _HalfTape(), tuple(_HalfTape() for _ in halves.cuts)
        self.params = params
        self.shared.values |= dict(zip(halves.cuts[0].arguments, params, strict=False))
        self._watched = watched

    def results(self, half: int) -> list[Tensor]:
        """Takes them of a half that is through, as leaves."""
        tape = self.tapes[half]
        names = self.halves.cuts[half].results
        found = [tape.values[name].detach().requires_grad_(name in tape.slots) for name in names]
        for name in names:
            if name in tape.slots:
                tape.values.pop(name, None)
        return found

    def differs(self, index: int) -> bool:
        """Whether a result has a gradient."""
        name = self.halves.cuts[0].results[index]
        return name in self.tapes[0].slots or self._is_leaf(name)

    def _is_leaf(self, name: str) -> bool:
        """Whether it is what entered, with a gradient."""
        value = self.tapes[0].values.get(name)
        return isinstance(value, Tensor) and value.requires_grad

    def give(self, half: int, index: int, gradient: Tensor) -> None:
        """Adds to the gradient of a result of a half."""
        self.tapes[half].add(self.halves.cuts[half].results[index], gradient)

    # Forward.

    def forward(self, half: int, inputs: Sequence[Tensor]) -> Turns:
        """Computes a half from its inputs, which are leaves."""
        cut, tape = self.halves.cuts[half], self.tapes[half]
        names = self.halves.cuts[0].arguments[self.halves.num_params :]
        if 0 not in self.shared.made:
            self._compute(self.halves.cuts[0].phases[0], 0, self.shared, None)
        tape.values = self.shared.values | dict(zip(names, inputs, strict=True))
        tape.slots = dict(self.shared.slots)
        runner = self._watched[half] if self._watched else None
        if runner:
            runner.begin(self.comm, tape.values)
        for number, phase in enumerate(cut.phases[1:], 1):
            self._compute(phase, number, tape, runner)
            begun = [(moved, moved.begin(self.comm, tape.values)) for moved in phase.moves]
            if any(moved.sends_forward for moved in phase.moves):
                yield
            if phase.beside:
                self._compute(phase.beside, -number, tape, runner)
            for moved, arrive in begun:
                differs = self.graph and tape.differs(moved.source)
                tape.keep(moved.made, arrive(), differs=differs)
                if runner:
                    runner.arrived(moved, tape.values, differs=differs)
            del begun
            for name in phase.drops:
                del tape.values[name]

    def _compute(
        self, phase: Phase, number: int, tape: _HalfTape, runner: PhaseRunner | None
    ) -> None:
        given = {name: tape.read(name, graph=self.graph) for name in phase.reads}
        with torch.set_grad_enabled(self.graph):
            results = runner.run(phase, given) if runner else phase.code(self.comm, *given.values())
        kept = []
        for name, result in zip(phase.made, results, strict=True):
            differs = self.graph and isinstance(result, Tensor) and result.requires_grad
            tape.keep(name, result, differs=differs)
            if differs:
                kept.append((get_gradient_edge(result), tape.slots[name]))
        tape.made[number] = kept

    # Backward.

    def backward(self, half: int) -> Turns:
        """From the gradients of a half's results to those of its inputs; those of parameters are
        added to theirs."""
        cut, tape = self.halves.cuts[half], self.tapes[half]
        for number in range(len(cut.phases) - 1, 0, -1):
            begun = []
            for moved in cut.phases[number].moves:
                slot = tape.slots.pop(moved.made, None)
                if slot is not None and slot.gradient is not None:
                    begun.append((moved, moved.begin_back(self.comm, tape.values, slot.gradient)))
            if any(moved.sends_backward for moved, _ in begun):
                yield
            tape.later.run()
            _run_backward(tape.made.pop(-number, ()))
            for moved, arrive in begun:
                tape.add(moved.source, arrive())
            with put_off(tape.later):
                _run_backward(tape.made.pop(number))
        tape.later.run()

    def finish(self) -> None:
        """The rest of the backward, when both halves are through."""
        _run_backward(self.shared.made.pop(0))


def _run_backward(made: Sequence[tuple[GradientEdge, _Slot]]) -> None:
    pairs = [(edge, slot.gradient) for edge, slot in made if slot.gradient is not None]
    if pairs:
        run_backward([x for x, _ in pairs], [g for _, g in pairs])
        for _, slot in made:
            slot.gradient = None


class _Piped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, halves: Halves, comm: Comm, watched: Watched | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, ctx.run = halves.forward(comm, tensors, graph=True, watched=watched)
        constant = [x for i, x in enumerate(results) if not ctx.run.differs(i)]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        run: HalvesRun = ctx.run
        ctx.run = None
        halves, tapes = run.halves, run.tapes
        for i, (whole, dim) in enumerate(zip(gradients, halves.joins, strict=True)):
            if not run.differs(i):
                continue
            for half, part in enumerate(halves.parts(whole, dim)):
                run.give(half, i, part)
        turns = {half: run.backward(half) for half in reversed(range(len(tapes)))}
        take_turns(run.comm, halves.samples[0], turns)
        run.finish()
        names = halves.cuts[0].arguments[halves.num_params :]
        found = [
            gradient([tape.values[name] for tape in tapes], dim)
            for name, dim in zip(names, halves.splits, strict=True)
        ]
        return (None, None, None, *[None] * len(run.params), *found)
