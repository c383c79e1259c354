"""What a run leaves behind: the measured times and memory of one rank, and one step's timeline."""

from dataclasses import field
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.bounds import figure_problems
from meshwright.ir.plan.schedule import Work
from meshwright.ir.profile.profile import Machine
from meshwright.ir.text.canonical import at_path, check_schema, format_json, parse_json, read_text
from meshwright.ir.text.many import Many
from meshwright.ir.text.plain_text import shown

SCHEMA = "meshwright.measured/1"
_strict = ConfigDict(extra="forbid", allow_inf_nan=False)

StepKind = Literal["warm-up", "timed", "tuning", "tracked", "traced"]
"""Only timed steps count in medians; the others train as well, but are slower, or with sizes of
buckets that are only tried."""
Phase = Literal["batch", "totals", "schedule", "loss", "gradients", "optimizer", "publish"]
"""What a step consists of, in this order. `schedule` is the actions, `gradients` what of the
gradients' synchronisation is left after the last backward, `publish` the parameters' gathering."""
Purpose = Literal["blocks", "parameters", "gradients", "job"]
"""Collectives inside blocks, of parameters, of gradients, and of the job (loss, norm, totals)."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Spread:
    """Seconds of repeated work."""

    median_s: float
    p10_s: float
    p90_s: float


@dataclass(frozen=True, config=_strict, kw_only=True)
class StepMeasured:
    """One optimizer step."""

    kind: StepKind
    step_s: float
    loss: float | None
    """None if it is not finite."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class ActionMeasured:
    """One kind of action of one stage, over all micro-batches and detailed steps."""

    stage: int
    work: Work
    count: int
    busy: Spread
    """Without waiting for messages."""
    waiting: Spread
    """For messages of other stages."""
    blocked: Spread
    """The part of `busy` that stands in collectives."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class CollectiveMeasured:
    """Equal collectives of this rank, over the detailed steps."""

    purpose: Purpose
    stage: int
    """-1: of the whole job."""
    axis: str
    primitive: str
    nbytes: int
    """The whole value, as if replicated on the group."""
    size: int
    """Ranks of the group."""
    count: int
    median_s: float
    """From its start until it is known to be over."""
    spread: float
    """Half the distance of its 10th and 90th percentile, relative to the median."""
    exposed_s: float
    """Median of the part in which the rank did nothing else."""
    total_s: float
    """All exposed parts of all detailed steps."""
    form: str = ""
    """The form of synchronisation that it belongs to; empty: none."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class KernelMeasured:
    """Equal calls of a fused kernel, over all steps, warm-up and evaluation too."""

    kernel: str
    way: Literal["triton", "torch"]
    """`torch`: the operators that are its reference."""
    why: str = ""
    """Why not by Triton."""
    calls: int


@dataclass(frozen=True, config=_strict, kw_only=True)
class TensorMemory:
    """Bytes of all live tensors of the rank when they are most."""

    peak_bytes: int
    parameters_bytes: int
    """Of the peak; with buffers of the model."""
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    """The batch."""
    rest_bytes: int
    """Activations, workspace and communication buffers."""
    host_bytes: int = 0
    """The most in the memory of the device's host."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class MemoryMeasured:
    """Memory of the process. Peaks are those of steps that are neither tracked nor traced."""

    tensors: TensorMemory | None
    """None unless a step was tracked."""
    resident_before_bytes: int
    """Before the job was made."""
    resident_start_bytes: int
    """Before the first step."""
    resident_peak_bytes: int
    cuda_allocated_bytes: int | None = None
    """Peak of what torch had allocated, and reserved."""
    cuda_reserved_bytes: int | None = None


@dataclass(frozen=True, config=_strict, kw_only=True)
class TimedAction:
    """An action of the schedule, or a phase around it. Seconds from the start of the step."""

    name: str
    start_s: float
    end_s: float
    waiting_s: float = 0.0


@dataclass(frozen=True, config=_strict, kw_only=True)
class TimedMessage:
    """A message between stages as one end saw it."""

    border: int
    microbatch: int
    gradient: bool
    value: str
    source: int
    target: int
    nbytes: int
    start_s: float
    """The target begins to wait for it; the source hands it over."""
    end_s: float
    """It is there; it has been handed over."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class TimelineMeasured:
    """One timed step, action by action."""

    step: int
    started_s: float
    """Seconds since 1970, to lay ranks over each other."""
    actions: Many[TimedAction]
    messages: Many[TimedMessage]


@dataclass(frozen=True, config=_strict, kw_only=True)
class TriedSize:
    """A size of buckets that some steps ran with."""

    size_bytes: int
    step_s: float
    """Median, without the first."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class TunedBuckets:
    """Sizes of buckets that a job tried while it trained."""

    tried: Many[TriedSize]
    """The first is the plan's."""
    chosen_bytes: int
    """What the job runs with, once all trials are over."""
    over: bool
    """Whether they are."""
    steps: int
    """From the first trial's first to the last one's last, those between trials too."""
    elapsed_s: float
    """That these took."""
    spent_s: float
    """By which they took longer for tuning: trials slower than the plan's size, choosing sizes, and
    cutting buckets anew."""

    @property
    def gained(self) -> float:
        """Share of the step with the plan's size that the chosen one saves; 0 before a trial."""
        seconds = {trial.size_bytes: trial.step_s for trial in self.tried[::-1]}
        first = self.tried[0].step_s if self.tried else 0.0
        return 1 - seconds.get(self.chosen_bytes, first) / first if first else 0.0


@dataclass(frozen=True, config=_strict, kw_only=True)
class CacheMeasured:
    """What a table's cache has had of what was asked of it on one rank."""

    table: str
    """Module path."""
    slots: int
    rows: int
    """That ranks' batches read, each once a batch."""
    here: int
    """Those that were in a slot."""
    written: int
    """Rows that had changed and went back to the host to make room."""

    @property
    def hit_rate(self) -> float:
        return self.here / self.rows if self.rows else 1.0


@dataclass(frozen=True, config=_strict, kw_only=True)
class Measured:
    """One rank of one run."""

    schema: str = SCHEMA
    plan: str
    """Hash of the plan."""
    rank: int
    world_size: int
    machine: Machine
    host: str
    steps: Many[StepMeasured]
    actions: Many[ActionMeasured]
    collectives: Many[CollectiveMeasured]
    phases: dict[Phase, Spread] = field(default_factory=dict)
    updated_tensors: int
    """That the optimizer steps, and their bytes."""
    updated_bytes: int
    memory: MemoryMeasured
    timeline: TimelineMeasured | None = None
    kernels: Many[KernelMeasured] = ()
    """Forward and backward are calls of their own."""
    tuned: TunedBuckets | None = None
    """Rank 0's, where the job was asked to tune."""
    caches: Many[CacheMeasured] = ()
    """Of tables, over all steps."""
    detailed: int = 0
    """The last timed steps, which actions, collectives and phases are of; 0: all."""

    @property
    def timed_steps(self) -> int:
        return sum(step.kind == "timed" for step in self.steps)

    @property
    def detailed_steps(self) -> int:
        return self.detailed or self.timed_steps


_ADAPTER = TypeAdapter(Measured)
_SIGNED = frozenset({"loss", "stage", "border", "microbatch", "start_s", "end_s"})


def save(measured: Measured, path: str | Path) -> None:
    """Writes it as JSON."""
    Path(path).write_text(format_json(_ADAPTER.dump_python(measured, mode="json")), "utf-8")


def load(path: str | Path) -> Measured:
    """Reads it; PlanError names what is wrong with the file."""
    text = read_text(path)
    data = parse_json(text, str(path))
    check_schema(data, SCHEMA, str(path))
    try:
        found = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, given {shown(at_path(data, e['loc']))}"
            for e in error.errors(include_url=False, include_input=False)[:5]
        )
        raise PlanError(f"{path}: {reasons}") from error
    problems = figure_problems("measured", found, _SIGNED, frozenset({"step_s", "world_size"}))
    if beyond := [*islice(problems, 5)]:
        raise PlanError(f"{path}: {'; '.join(beyond)}")
    return found


def load_run(folder: str | Path) -> tuple[Measured, ...]:
    """The files of all ranks of a run directory, by rank; PlanError if one is missing or odd."""
    folder = Path(folder)
    try:
        paths = sorted(folder.glob("measured_rank*.json"))
    except OSError as error:
        raise PlanError(f"{folder}: cannot be read: {error.strerror}") from error
    found = sorted(map(load, paths), key=lambda m: m.rank)
    if not found:
        raise PlanError(f"{folder}: has no measured_rank*.json; give the folder of a finished run")
    ranks, world = [m.rank for m in found], found[0].world_size
    if world != len(ranks) or ranks != list(range(world)):
        raise PlanError(f"{folder}: has ranks {str(ranks)[:80]}, the run had {world}")
    if len({m.plan for m in found}) > 1:
        raise PlanError(f"{folder}: its files are of several plans; they must be of one run")
    return tuple(found)
