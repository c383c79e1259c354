"""The loop: takes a rank's row of the schedule action by action."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.plan.schedule import FORWARDS, Action, Pair, Work
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.stage.stage import StageModule, Taking

Inputs = Callable[[int, int], Mapping[str, Tensor]]
"""(stage, micro-batch) -> the stage's graph inputs and totals by name."""


@dataclass(eq=False)
class RankProgress:
    """Where a rank is, for those who watch it."""

    step: int = 0
    action: str = "start"
    phase: str = "idle"
    """idle, running, receiving, synchronising."""
    entered: int = 0
    """How often it was somewhere else."""
    busy_s: float = 0.0
    """What the newest step that is over took, without what it waited for others."""
    thread: int = field(default_factory=threading.get_ident)
    """The one that steps."""

    def at(self, step: int, action: str, phase: str) -> None:
        self.step, self.action, self.phase = step, action, phase
        self.entered, self.thread = self.entered + 1, threading.get_ident()


class Executor:
    """Runs the forward (and backward) of one step on one rank."""

    def __init__(
        self,
        row: tuple[Action, ...],
        stages: Mapping[int, StageModule],
        mailbox: Mailbox,
        offsets: Mapping[int, int],
        samples_per_microbatch: int,
        progress: RankProgress,
        recorder: Recorder,
        *,
        pairs: Collection[Pair] = (),
        tf32: bool = False,
    ) -> None:
        """`pairs`: actions of the row that run together. `tf32`: GPUs may round operands of float32
        products."""
        self._row, self._stages, self._mailbox = row, stages, mailbox
        self._pairs = frozenset(pairs)
        self._offsets, self._per_microbatch = offsets, samples_per_microbatch
        self._progress, self._recorder = progress, recorder
        self._training = any(action.work not in FORWARDS for action in row)
        self._last = _last_backwards(row)
        self._tf32 = tf32
        self._last_forwards = frozenset({a.stage: a for a in row if a.work in FORWARDS}.values())

    def run(self, inputs: Inputs) -> Tensor | None:
        """The sum of the losses of this rank's micro-batches; None without the last stage."""
        total: Tensor | None = None
        index = 0
        with rounded_products() if self._tf32 else nullcontext():
            while index < len(self._row):
                size = self._size(index)
                after = index + size
                self._mailbox.post(after - 1 + self._size(after))  # one ahead of need
                action, *others = self._row[index:after]
                with self._recorder.section(action):
                    loss = (
                        self._pair(action, others[0], inputs)
                        if others
                        else self._take(action, inputs)
                    )
                for other in others:  # all that a pair takes counts as of its first
                    self._recorder.ended(other, self._recorder.mark())
                index = after
                if loss is not None:
                    total = loss if total is None else total + loss
        self._at("end of the schedule", "receiving")
        self._mailbox.finish()
        return total

    def _size(self, index: int) -> int:
        """How many actions run together from this one on."""
        return 1 + (self._row[index : index + 2] in self._pairs)

    def _pair(self, first: Action, second: Action, inputs: Inputs) -> Tensor | None:
        """A forward and a backward in turns: each goes on while the other waits for a collective.
        Both have what they need before, and what they make is sent when both are over."""
        stages = self._stages[first.stage], self._stages[second.stage]
        values = self._received(first, inputs)
        gradients = self._gradients(second)
        for action in (first, second):
            self.place(action.stage, action.microbatch)
        self._at(first, "running")
        last = stages[0].reduce_early and first in self._last_forwards
        made, sent_back = take_turns(
            stages[0].forward_turns(first.microbatch, values, last=last),
            stages[1].backward_turns(second.microbatch, gradients, self._completes(second)),
        )
        self._send(first, made)
        self._send_back(second, sent_back)
        return made.get(stages[0].program.loss)

    def _take(self, action: Action, inputs: Inputs) -> Tensor | None:
        self.place(action.stage, action.microbatch)
        match action.work:
            case Work.FORWARD | Work.FORWARD_KEEPING:
                return self._forward(action, inputs)
            case Work.RECOMPUTE:
                self._at(action, "running")
                self._stages[action.stage].recompute(action.microbatch)
            case Work.BACKWARD | Work.BACKWARD_INPUT:
                self._backward(action)
            case Work.BACKWARD_WEIGHT:
                self._at(action, "running")
                stage = self._stages[action.stage]
                stage.backward_weight(action.microbatch, self._completes(action))
        return None

    def _completes(self, action: Action) -> bool:
        """Whether the stage's gradients are complete after it and may be sent off at once."""
        return self._stages[action.stage].reduce_early and action in self._last

    def _at(self, action: Action | str, phase: str) -> None:
        self._progress.at(self._progress.step, str(action), phase)

    def place(self, stage: int, microbatch: int) -> None:
        """Tells the generated code where it is: dropout masks depend on it."""
        comm = self._stages[stage].comm
        comm.microbatch = microbatch
        comm.sample_offset = microbatch * self._per_microbatch + self._offsets[stage]

    def _forward(self, action: Action, inputs: Inputs) -> Tensor | None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        values = self._received(action, inputs)
        self._at(action, "running")
        made: Mapping[str, Tensor] = stage(
            microbatch, values, keep=self._training, whole=action.work is Work.FORWARD_KEEPING,
            last=stage.reduce_early and action in self._last_forwards,
        )  # fmt: skip
        self._send(action, made)
        return made.get(stage.program.loss)

    def _received(self, action: Action, inputs: Inputs) -> dict[str, Tensor]:
        """What a forward reads."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        self._at(action, "receiving")
        values = dict(inputs(action.stage, microbatch))
        for value in stage.program.receives:
            received = self._mailbox.receive(action.stage - 1, value.name, False, microbatch)
            assert received is not None
            values[value.name] = received
        return values

    def _send(self, action: Action, made: Mapping[str, Tensor]) -> None:
        for value in self._stages[action.stage].program.sends:
            self._mailbox.send(action.stage, value.name, False, action.microbatch, made[value.name])

    def _gradients(self, action: Action) -> dict[str, Tensor]:
        """What comes back of what the stage has sent."""
        self._at(action, "receiving")
        gradients = {}
        for value in self._stages[action.stage].program.sends:
            if value.requires_grad:
                gradient = self._mailbox.receive(action.stage, value.name, True, action.microbatch)
                if gradient is not None:
                    gradients[value.name] = gradient
        return gradients

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        gradients = self._gradients(action)
        self._at(action, "running")
        if action.work is Work.BACKWARD:
            made = stage.backward(microbatch, gradients, self._completes(action))
        else:
            made = stage.backward_input(microbatch, gradients)
        self._send_back(action, made)

    def _send_back(self, action: Action, made: Mapping[str, Tensor]) -> None:
        for name, gradient in made.items():
            self._mailbox.send(action.stage - 1, name, True, action.microbatch, gradient)


def take_turns(first: Taking, second: Taking) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What two stages make, each as far as its next collective in turn, the first one first."""
    made = [dict[str, Tensor](), dict[str, Tensor]()]
    left = {0: first, 1: second}
    while left:
        for number, taking in list(left.items()):
            try:
                next(taking)
            except StopIteration as over:
                made[number] = over.value
                del left[number]
    return made[0], made[1]


@contextmanager
def rounded_products() -> Iterator[None]:
    """Lets GPUs round operands of products of float32 to TF32; the process's own choice is back
    after it."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = True
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def _last_backwards(row: tuple[Action, ...]) -> frozenset[Action]:
    """Per stage, the last action that adds to parameter gradients."""
    last = {a.stage: a for a in row if a.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)}
    return frozenset(last.values())
