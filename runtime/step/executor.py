"""The loop: takes a rank's row of the schedule action by action."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.plan.schedule import FORWARDS, Action, Work
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.stage.stage import StageModule

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
        tf32: bool = False,
    ) -> None:
        """`tf32`: GPUs may round operands of float32 products."""
        self._row, self._stages, self._mailbox = row, stages, mailbox
        self._offsets, self._per_microbatch = offsets, samples_per_microbatch
        self._progress, self._recorder = progress, recorder
        self._training = any(action.work not in FORWARDS for action in row)
        self._last = _last_backwards(row)
        self._tf32 = tf32
        self._last_forwards = frozenset({a.stage: a for a in row if a.work in FORWARDS}.values())

    def run(self, inputs: Inputs) -> Tensor | None:
        """The sum of the losses of this rank's micro-batches; None without the last stage."""
        total: Tensor | None = None
        with rounded_products() if self._tf32 else nullcontext():
            for index, action in enumerate(self._row):
                self._mailbox.post(index + 1)  # one ahead of need
                with self._recorder.section(action):
                    loss = self._take(action, inputs)
                if loss is not None:
                    total = loss if total is None else total + loss
        self._at("end of the schedule", "receiving")
        self._mailbox.finish()
        return total

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
        border = action.stage - 1
        self._at(action, "receiving")
        values = dict(inputs(action.stage, microbatch))
        for value in stage.program.receives:
            received = self._mailbox.receive(border, value.name, False, microbatch)
            assert received is not None
            values[value.name] = received
        self._at(action, "running")
        made: Mapping[str, Tensor] = stage(
            microbatch, values, keep=self._training, whole=action.work is Work.FORWARD_KEEPING,
            last=stage.reduce_early and action in self._last_forwards,
        )  # fmt: skip
        for value in stage.program.sends:
            self._mailbox.send(action.stage, value.name, False, microbatch, made[value.name])
        return made.get(stage.program.loss)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        self._at(action, "receiving")
        gradients = {}
        for value in stage.program.sends:
            if value.requires_grad:
                gradient = self._mailbox.receive(action.stage, value.name, True, microbatch)
                if gradient is not None:
                    gradients[value.name] = gradient
        self._at(action, "running")
        if action.work is Work.BACKWARD:
            made = stage.backward(microbatch, gradients, self._completes(action))
        else:
            made = stage.backward_input(microbatch, gradients)
        for name, gradient in made.items():
            self._mailbox.send(action.stage - 1, name, True, microbatch, gradient)


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
