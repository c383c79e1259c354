"""Takes the times of a step: cheap marks while it runs, sorted out when it is over.

On CPU a mark is a reading of the clock, on a GPU an event in its stream, so that nothing waits.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.plan.schedule import Action
from meshwright.ir.profile.measured import Phase, StepKind
from meshwright.runtime.messages.messages import Message
from meshwright.runtime.record.late import LateNumber

Mark = float | torch.Event


class Section(NamedTuple):
    """A phase or an action. Seconds are counted from the start of the step."""

    name: Phase | Action
    start_s: float
    end_s: float


class Passed(NamedTuple):
    """A message that was waited for, or handed over."""

    section: int
    """Index in `sections` of the one it happened in."""
    message: Message
    nbytes: int
    start_s: float
    end_s: float


class Collected(NamedTuple):
    """A collective that is over."""

    section: int
    what: What
    start_s: float
    blocked_s: float
    """Since when the rank did nothing else."""
    end_s: float


@dataclass(eq=False)
class StepRecord:
    """One step of one rank; complete once it is closed."""

    start: Mark
    started_s: float
    """Seconds since 1970."""
    kind: StepKind
    number: int = 0
    """Of the step, as the job counts them."""
    step_s: float = 0.0
    losses: list[LateNumber] = field(default_factory=list)
    """Of each batch of the step."""
    norm: LateNumber | None = None
    """Of its gradients, where it is limited."""
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)
    """When the job was at it: what the user does between the batches of a step is not of it."""
    is_closed: bool = False
    sections: list[Section] = field(default_factory=list)
    waits: list[Passed] = field(default_factory=list)
    sends: list[Passed] = field(default_factory=list)
    collectives: list[Collected] = field(default_factory=list)
    raw_sections: list[tuple[Phase | Action, Mark, Mark]] = field(default_factory=list)
    raw_waits: list[tuple[int, Message, int, Mark, Mark]] = field(default_factory=list)
    raw_sends: list[tuple[int, Message, int, Mark, Mark]] = field(default_factory=list)
    raw_collectives: list[tuple[int, What, Mark, Mark, Mark]] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """Of its last batch."""
        return float(self.losses[-1]) if self.losses else None

    def idle(self) -> tuple[dict[int, float], dict[int, float]]:
        """Section -> seconds in it that the rank waited for messages, and stood in collectives; of
        a closed one."""
        waiting: dict[int, float] = defaultdict(float)
        blocked: dict[int, float] = defaultdict(float)
        for wait in self.waits:
            waiting[wait.section] += wait.end_s - wait.start_s
        for done in self.collectives:
            blocked[done.section] += done.end_s - done.blocked_s
        return waiting, blocked

    @property
    def busy_s(self) -> float:
        """What the rank did by itself in its actions; of a closed one."""
        waiting, blocked = self.idle()
        return sum(
            end_s - start_s - waiting[index] - blocked[index]
            for index, (name, start_s, end_s) in enumerate(self.sections)
            if isinstance(name, Action)
        )

    def heard(self, loss: Tensor) -> None:
        """The loss of a batch, which the host reads when it is there."""
        self.losses.append(LateNumber(loss))

    def close(self) -> None:
        """Turns marks into seconds; waits until the device has finished the step."""
        at = self._seconds
        if self.spans and isinstance(end := self.spans[-1][1], torch.Event):
            end.synchronize()
        self.step_s = sum(at(b) - at(a) for a, b in self.spans)
        self.sections = [Section(name, at(a), at(b)) for name, a, b in self.raw_sections]
        self.waits = [Passed(i, m, n, at(a), at(b)) for i, m, n, a, b in self.raw_waits]
        self.sends = [Passed(i, m, n, at(a), at(b)) for i, m, n, a, b in self.raw_sends]
        self.collectives = [
            Collected(i, what, self._since(a), at(b), at(c))
            for i, what, a, b, c in self.raw_collectives
        ]
        for raw in (self.raw_sections, self.raw_waits, self.raw_sends, self.raw_collectives):
            raw.clear()
        self.spans.clear()
        self.is_closed = True

    def _since(self, mark: Mark) -> float:
        """When it began; what the step before began, when this one began."""
        between = isinstance(mark, float) and not isinstance(self.start, float)
        return 0.0 if between else max(0.0, self._seconds(mark))

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            assert isinstance(self.start, float)
            return mark - self.start
        assert isinstance(self.start, torch.Event)
        return float(self.start.elapsed_time(mark)) / 1e3


class Recorder:
    """What all parts of a rank report to. Between steps, and in evaluation, it hears nothing."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self.record: StepRecord | None = None
        self.naming = False
        """A profiler watches: actions get their names in its trace."""

    def begin(self, kind: StepKind, number: int = 0) -> StepRecord:
        """A step begins now."""
        self.record = StepRecord(self._now(), time.time(), kind, number)
        return self.record

    def mark(self) -> Mark:
        """Now."""
        return 0.0 if self.record is None else self._now()

    def ended(self, name: Phase | Action, start: Mark) -> None:
        """A phase or an action that began at `start` is over."""
        if (record := self.record) is not None:
            record.raw_sections.append((name, start, self._now()))

    def _now(self) -> Mark:
        if not self._events:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def section(self, name: Phase | Action) -> AbstractContextManager[object]:
        """What runs inside is a phase or an action."""
        if not self.naming:
            return _Section(self, name)
        stack = ExitStack()
        stack.enter_context(record_function(str(name)))
        stack.enter_context(_Section(self, name))
        return stack

    def waited(self, message: Message, nbytes: int, start: Mark) -> None:
        """A message that the rank asked for at `start` is there."""
        if (record := self.record) is not None:
            place = len(record.raw_sections)
            record.raw_waits.append((place, message, nbytes, start, self._now()))

    def sent(self, message: Message, nbytes: int, start: Mark) -> None:
        """A message is on its way."""
        if (record := self.record) is not None:
            place = len(record.raw_sections)
            record.raw_sends.append((place, message, nbytes, start, self._now()))

    def collected(self, what: What, start: Mark, blocked: Mark) -> None:
        """A collective is over: the rank has done nothing else since `blocked`."""
        if (record := self.record) is not None:
            place = len(record.raw_sections)
            record.raw_collectives.append((place, what, start, blocked, self._now()))

    def block_collective(
        self,
        stage: int,
        axis: str,
        primitive: str,
        nbytes: int,
        size: int,
        start: Mark,
        blocked: Mark | None = None,
    ) -> None:
        """The meter that generated code reports to."""
        what = What("blocks", stage, axis, primitive, nbytes, size)
        self.collected(what, start, start if blocked is None else blocked)

    @contextmanager
    def collective(self, what: What) -> Iterator[None]:
        """What runs inside is one collective that the rank waits for."""
        start = self.mark()
        yield
        self.collected(what, start, start)

    def pending(self, what: What, work: Waitable, start: Mark) -> "Pending":
        """A collective that goes on in the background."""
        return Pending(self, what, work, start)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside belongs to no step."""
        record, self.record = self.record, None
        try:
            yield
        finally:
            self.record = record


class _Section:
    """As a generator it would cost several times as much."""

    __slots__ = ("_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: Phase | Action) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._start = self._recorder.mark()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._recorder.ended(self._name, self._start)


@dataclass(frozen=True, eq=False, slots=True)
class Pending:
    """A collective under way."""

    recorder: Recorder
    what: What
    work: Waitable
    start: Mark

    def wait(self) -> None:
        blocked = self.recorder.mark()
        self.work.wait()
        self.recorder.collected(self.what, self.start, blocked)
