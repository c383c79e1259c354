"""The calls of a stage as they are recorded and replayed, forward and backward.

A micro-batch in flight has a *slot*: memory at fixed addresses for what its calls read, keep and
make, and for the keys of the random numbers that they draw, with recordings of their own. What
comes from elsewhere is copied into it, what one call makes the next one reads where it is, and what
leaves the stage is copied out. Gradients of parameters are added, inside of what is recorded, to
tensors that all slots share and that parameters have as their gradients.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call
from meshwright.codegen.sharded.places import drawn
from meshwright.ir.errors import PlanError
from meshwright.runtime.capture.fixed_mesh import FixedMesh
from meshwright.runtime.capture.held_numbers import HeldNumbers
from meshwright.runtime.capture.recorder import LaunchRecorder, Replay

R = TypeVar("R")
_HOLDERS = 3
"""Of a parameter's sum while nobody else has it: the table of sums, who looks, and the argument of
`getrefcount`."""


class Captured(Protocol):
    """A block that may be recorded."""

    call: Call
    tensors: list[Tensor]


@dataclass(eq=False)
class _ForwardRun:
    """What a recorded forward has: tensors at fixed addresses."""

    replay: Replay
    inside: list[Tensor]
    """Its inputs, as leaves of its graph."""
    parameters: list[Tensor]
    """Likewise what it reads of the model."""
    outputs: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    """Of what it reads."""


@dataclass(eq=False)
class _BackwardRun:
    replay: Replay
    arriving: dict[int, Tensor]
    """Number of an output -> where its gradient is read."""
    lent: frozenset[int]
    """Of these, what another recording of the slot writes."""
    gradients: list[Tensor | None]
    """Of the inputs."""


@dataclass(eq=False)
class CaptureSlot:
    """Memory for one micro-batch in flight."""

    numbers: HeldNumbers
    entering: dict[str, Tensor] = field(default_factory=dict)
    forwards: dict[tuple[int, bool], _ForwardRun] = field(default_factory=dict)
    """By the number of the call, and whether it keeps what its backward needs."""
    backwards: dict[tuple[int, bool], _BackwardRun] = field(default_factory=dict)
    """By the number of the call, and whether it runs forward again before."""
    fixed: set[int] = field(default_factory=set)
    """Addresses of what its recordings make."""

    def made(self, index: int, *, graph: bool) -> tuple[Tensor, ...]:
        """Returns what a call has made."""
        return self.forwards[index, graph].outputs


class CapturedCalls:
    """Of one stage. A whole micro-batch runs as it is before any is recorded: libraries get ready
    in it, and it shows which parameters have gradients."""

    def __init__(
        self,
        blocks: Sequence[Captured],
        comm: Comm,
        casts: Callable[[], AbstractContextManager[None]],
        recorder: LaunchRecorder,
    ) -> None:
        self._blocks, self._comm, self._casts = tuple(blocks), comm, casts
        self._mesh = FixedMesh(comm)
        self._recorder = recorder
        self._free: list[CaptureSlot] = []
        self._trained: dict[int, list[int]] = {}
        """Call -> which of what it reads have got gradients by it."""
        self._sums: dict[int, Tensor] = {}
        """Parameter by its id -> to what recordings add its gradients."""
        self.slots = 0
        self._warm = False

    def take(self) -> CaptureSlot | None:
        """Returns a slot for the micro-batch that begins; None: it runs as it is."""
        if not self._warm or not self._comm.training:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            self.slots += 1
            wanted = (one for block in self._blocks for one in drawn(block.call))
            slot = CaptureSlot(HeldNumbers(self._comm, wanted))
        slot.numbers.write()
        return slot

    def give_back(self, slot: CaptureSlot | None) -> None:
        """The backward of its micro-batch is over."""
        if slot is not None:
            self._free.append(slot)
        else:
            self._warm = True

    def forget(self) -> None:
        """Nothing has been recorded: what runs may be another now."""
        self._free.clear()
        self._trained.clear()
        self._sums.clear()
        self.slots, self._warm = 0, False

    def saw(self, index: int) -> None:
        """A call's backward has run as it is."""
        if index not in self._trained:
            self._trained[index] = [
                i for i, x in enumerate(self._blocks[index].tensors) if x.grad is not None
            ]

    def enter(self, slot: CaptureSlot, name: str, value: Tensor) -> Tensor:
        """Copies what comes from outside of the stage's calls to its place; returns that."""
        known = slot.entering.get(name)
        if known is None:
            slot.entering[name] = known = value.detach().clone()
            slot.fixed.add(known.data_ptr())
        else:
            known.copy_(value.detach())
        return known.detach().requires_grad_(value.requires_grad)

    def forward(
        self, index: int, slot: CaptureSlot, inputs: Sequence[Tensor], *, graph: bool
    ) -> tuple[Tensor, ...]:
        """What a call makes of what has its place in the slot, there."""
        known = slot.forwards.get((index, graph))
        if known is not None and known.addresses == self._addresses(index, inputs):
            known.replay()
            return known.outputs
        # Where something is elsewhere, as after parameters were moved, it is recorded anew.
        slot.backwards.pop((index, not graph), None)
        self._mesh.held = slot.numbers
        replay, (inside, parameters, outputs) = self._record(
            index, lambda: self._run(index, inputs, graph)
        )
        slot.fixed.update(x.data_ptr() for x in outputs)
        slot.forwards[index, graph] = _ForwardRun(
            replay, inside, parameters, outputs, self._addresses(index, inputs)
        )
        return outputs

    def _addresses(self, index: int, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in (*self._blocks[index].tensors, *inputs)])

    def _run(
        self, index: int, inputs: Sequence[Tensor], graph: bool
    ) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
        """A call on leaves of its own, so that nothing of its graph is older than the recording."""
        block = self._blocks[index]
        inside = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        parameters = [x.detach().requires_grad_(x.requires_grad) for x in block.tensors]
        with torch.set_grad_enabled(graph), self._casts():
            outputs = block.call.run(self._mesh, *parameters, *inside)
        return inside, parameters, outputs

    def backward(
        self,
        index: int,
        slot: CaptureSlot,
        inputs: Sequence[Tensor],
        arriving: dict[int, Tensor],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Gradients of the inputs, from those of outputs by their numbers; those of parameters are
        added to theirs. `again`: the call runs forward again before."""
        known = slot.backwards.get((index, again))
        apart = self._prepare(index)
        if known is not None and self._bring(known, arriving):
            known.replay()
        else:
            known = self._record_backward(index, slot, inputs, arriving, again)
            slot.backwards[index, again] = known
        for parameter in apart:
            assert parameter.grad is not None
            parameter.grad.add_(self._sums[id(parameter)])
        return known.gradients

    def _bring(self, known: _BackwardRun, arriving: dict[int, Tensor]) -> bool:
        """Whether gradients are where a recording reads them."""
        if known.arriving.keys() != arriving.keys():
            return False
        for number, given in arriving.items():
            place = known.arriving[number]
            if place.data_ptr() != given.data_ptr():
                if number in known.lent:
                    return False
                place.copy_(given)
        return True

    def _prepare(self, index: int) -> list[nn.Parameter]:
        """Sums of the call's parameters are their gradients, and zero if there were none; returns
        those parameters that have gradients elsewhere, to which sums are to be added."""
        apart, clear = [], []
        for i in self._trained[index]:
            parameter = self._blocks[index].tensors[i]
            assert isinstance(parameter, nn.Parameter)
            total = self._sums.get(id(parameter))
            if total is None:
                total = parameter.grad
                if total is None:
                    total = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                self._sums[id(parameter)] = parameter.grad = total
            elif parameter.grad is None:
                if sys.getrefcount(total) > _HOLDERS:
                    raise PlanError(
                        f"block {self._blocks[index].call.block}: the gradient of a micro-batch is "
                        "still held when the next one's is made where it was (capture true); "
                        "nearest is capture false"
                    )
                clear.append(total)
                parameter.grad = total
            elif parameter.grad.data_ptr() != total.data_ptr():
                clear.append(total)
                apart.append(parameter)
        if clear:
            torch._foreach_zero_(clear)
        return apart

    def _record_backward(
        self,
        index: int,
        slot: CaptureSlot,
        inputs: Sequence[Tensor],
        arriving: dict[int, Tensor],
        again: bool,
    ) -> _BackwardRun:
        lent = frozenset(i for i, x in arriving.items() if x.data_ptr() in slot.fixed)
        self._mesh.held = slot.numbers
        places = {i: x.detach() if i in lent else x.detach().clone() for i, x in arriving.items()}

        def region() -> list[Tensor | None]:
            if again:
                self._comm.recomputing = True
                try:
                    inside, parameters, outputs = self._run(index, inputs, True)
                finally:
                    self._comm.recomputing = False
            else:
                run = slot.forwards[index, True]
                inside, parameters, outputs = run.inside, run.parameters, run.outputs
            wanted = [*inside, *(parameters[i] for i in self._trained[index])]
            # What a forward kept is read by each replay of the backward: it is never freed.
            made = gradients_of(outputs, places, wanted, keep=not again)
            self._add(index, made[len(inside) :])
            return made[: len(inside)]

        replay, gradients = self._record(index, region)
        slot.fixed.update(x.data_ptr() for x in gradients if x is not None)
        return _BackwardRun(replay, places, lent, gradients)

    def _add(self, index: int, made: Sequence[Tensor | None]) -> None:
        """Adds gradients of what a call trains to their sums."""
        own = [self._blocks[index].tensors[i] for i in self._trained[index]]
        pairs = [
            (self._sums[id(x)], more) for x, more in zip(own, made, strict=True) if more is not None
        ]
        if pairs:
            with torch.no_grad():
                torch._foreach_add_([total for total, _ in pairs], [more for _, more in pairs])

    def _record(self, index: int, region: Callable[[], R]) -> tuple[Replay, R]:
        try:
            return self._recorder.record(region)
        except torch.OutOfMemoryError:
            raise
        except (PlanError, RuntimeError) as error:
            block = self._blocks[index].call.block
            raise PlanError(
                f"block {block} cannot be recorded (capture true): {error}; nearest is capture "
                "false"
            ) from error


def gradients_of(
    outputs: Sequence[Tensor],
    arriving: Mapping[int, Tensor],
    wanted: Sequence[Tensor],
    *,
    keep: bool,
) -> list[Tensor | None]:
    """Gradients of what is wanted, None where there is none, from those that arrive at outputs of
    these numbers; `keep`: the graph is kept."""
    places = [i for i, x in enumerate(wanted) if x.requires_grad]
    starts = [i for i in arriving if outputs[i].requires_grad]
    made = torch.autograd.grad(
        [outputs[i] for i in starts], [wanted[i] for i in places], [arriving[i] for i in starts],
        retain_graph=keep, allow_unused=True,
    )  # fmt: skip
    found: list[Tensor | None] = [None] * len(wanted)
    for place, gradient in zip(places, made, strict=True):
        found[place] = gradient
    return found
