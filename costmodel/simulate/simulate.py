"""Runs any schedule table against stage costs: when each action of one step runs.

A rank takes its actions in order. A message is asked for one action ahead and goes over the
sender's and the receiver's port, each of which carries one message per direction at a time, in the
order in which they are ready. Where ranks share nothing else each can run ahead of the others
(`costmodel.simulate.run_ahead`); where cores or copies are shared, and for a log, events are run in
order of time (`costmodel.simulate.events`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.costmodel.simulate.blocking import run_blocking
from meshwright.costmodel.simulate.compiled_schedule import (
    HELD,
    LAST,
    NUM_KINDS,
    WORK_OF,
    B,
    I,
    Table,
    table_of,
)
from meshwright.costmodel.simulate.events import run_events
from meshwright.costmodel.simulate.run_ahead import run_ahead
from meshwright.costmodel.simulate.timeline import Timeline, Times
from meshwright.costmodel.stage.program import (
    BESIDE,
    NO_SLOWDOWN,
    Do,
    Overlap,
    Program,
    Step,
    run,
)
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Schedule, Work


class HiddenTogether(NamedTuple):
    """What a forward and a backward that run together hide of their collectives."""

    seconds: float = 0.0
    between_s: float = 0.0
    """Of that, on links between nodes: gradients on their way there wait for it."""
    whole_s: float | None = None
    """What the two take, if a plan says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One micro-batch of one stage. Seconds when nothing else runs on its cores; bytes per rank."""

    forward_s: float
    backward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    again_s: float = 0.0
    """Of `backward_s` and `backward_input_s`: making again what the forward did not keep."""
    send_s: float = 0.0
    """Its outputs to the next stage."""
    back_s: float | None = None
    """The gradients of these back; None: as long."""
    is_silent: bool = False
    """No gradients come back of what it sends: its backwards wait for none."""
    saved_bytes: int = 0
    """Held from the start of a forward to the end of its (whole) backward."""
    processes: int = 1
    """Devices that run the stage together."""
    programs: Mapping[int, Program] = field(default_factory=dict)
    """Kind of action (`costmodel.simulate.compiled_schedule`) -> what it does, where it is more
    than to compute."""
    overlap: Overlap = NO_SLOWDOWN
    offload_s: float = 0.0
    """Copying what is offloaded of a forward to the host, and as long for fetching it again."""
    offload_bytes: int = 0
    """Of `saved_bytes`."""
    blocks: bool = False
    """Its messages keep both ends waiting."""
    together: Mapping[int, HiddenTogether] = field(default_factory=dict)
    """Stage of a backward that a forward of this one runs together with -> what the two hide."""

    def of(self, work: Work) -> float:
        match work:
            case Work.FORWARD | Work.FORWARD_KEEPING:
                return self.forward_s
            case Work.BACKWARD:
                return self.backward_s
            case Work.BACKWARD_INPUT:
                return self.backward_input_s
            case Work.BACKWARD_WEIGHT:
                return self.backward_weight_s
            case Work.RECOMPUTE:
                return self.again_s

    def program(self, kind: int) -> Program:
        """What an action of a kind does."""
        found = self.programs.get(kind) or self.programs.get(kind & (LAST - 1))
        if found is None:
            plain = kind & (LAST - 1)
            there_s = self.again_s if plain in (B + HELD, I + HELD) else 0.0
            found = Program((run(self.of(WORK_OF[plain]) - there_s, NAMES[plain]),))
        return found


_NONE = Program(())
"""Of kinds of actions that a schedule does not have."""
_FOUR = ("forward", "backward", "backward", "backward")
NAMES = (*_FOUR, *_FOUR[:3], "recompute")
"""Category of the seconds of a plain action, by kind."""


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    *,
    cores: float = float("inf"),
    offsets: Sequence[float] = (),
    talking: float = 0.0,
    detail: bool = False,
) -> Timeline:
    """The timeline of one step.

    `cores`: processes that can run at full speed at once. `offsets`: when each pipeline rank
    starts. `talking`: share of a core that a process needs to communicate. `detail`: keep a log of
    everything, for people.
    """
    silent = frozenset([index for index, stage in enumerate(stages) if stage.is_silent])
    table = table_of(schedule, silent)
    if len(table.owners) != len(stages):
        raise PlanError(
            f"schedule {schedule.name!r} has {len(table.owners)} stages, the costs {len(stages)}"
        )
    times = _times(table, stages, cores, tuple(offsets), talking)
    if times.blocks and cores == float("inf"):
        found = run_blocking(table, times)
    elif cores == float("inf") and not detail and not any(times.offload_s):
        found = run_ahead(table, times)
    else:
        found = run_events(table, times, detail=detail)
    saved = tuple(s.saved_bytes for s in stages)
    return Timeline(table, found, saved, times.offsets, tuple(s.offload_bytes for s in stages))


def _pairs(table: Table, stages: Sequence[StageTimes]) -> dict[tuple[int, int], Program]:
    found: dict[tuple[int, int], Program] = {}
    for position in table.together:
        ahead, back = table.items[position], table.items[position + 1]
        key = NUM_KINDS * ahead.stage + ahead.kind, NUM_KINDS * back.stage + back.kind
        if key not in found:
            programs = (
                stages[ahead.stage].program(ahead.kind), stages[back.stage].program(back.kind),
            )  # fmt: skip
            hidden = stages[ahead.stage].together.get(back.stage, HiddenTogether())
            found[key] = _joined(*programs, hidden)
    return found


def _joined(forward: Program, backward: Program, hidden: HiddenTogether) -> Program:
    """Both programs, without the collectives that the two hide."""
    if hidden.whole_s is not None:
        return Program((run(hidden.whole_s, "forward"),))
    steps = (*forward.steps, *backward.steps)
    sent_s = sum([s.seconds for s in steps if s.do is Do.TALK and s.what == "tensor"])
    left = max(0.0, 1 - hidden.seconds / sent_s) if sent_s else 1.0
    beside = backward.uses_channel and hidden.between_s
    return Program((
        *([Step(Do.START, hidden.between_s, BESIDE, "tensor")] if beside else []),
        *(s._replace(seconds=s.seconds * left) if s.do is Do.TALK and s.what == "tensor" else s
          for s in steps),
    ))  # fmt: skip


def _times(
    table: Table,
    stages: Sequence[StageTimes],
    cores: float,
    offsets: tuple[float, ...],
    talking: float,
) -> Times:
    return Times(
        programs=tuple(
            tuple(s.program(kind) if kind in used else _NONE for kind in range(NUM_KINDS))
            for s, used in zip(stages, table.kinds, strict=True)
        ),
        pairs=_pairs(table, stages),
        overlaps=tuple(s.overlap for s in stages),
        lanes_s=tuple(
            [
                seconds
                for s in stages
                for seconds in (s.send_s, s.send_s if s.back_s is None else s.back_s)
            ]
        ),
        offload_s=tuple(s.offload_s for s in stages),
        processes=tuple(s.processes for s in stages),
        blocks=any(s.blocks for s in stages),
        cores=cores,
        talking=talking,
        offsets=offsets or (0.0,) * len(table.rows),
    )
