"""What a prediction keeps for people: the model, the machines and the step, in small.

Reports, tables and traces are made of it, without the model and the cluster that it came from.
"""

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from meshwright.ir.errors import PlanError
from meshwright.ir.text.many import Many

_strict = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


NEXT_FORWARD = "under the next forward"
"""When a message goes that the next step's first forward hides."""
TrafficPurpose = Literal["tensors", "gradients", "parameters", "stages"]


@dataclass(frozen=True, config=_strict, kw_only=True)
class BlockName:
    """A block of the model."""

    name: str
    pattern: str


@dataclass(frozen=True, config=_strict, kw_only=True)
class ParameterShape:
    """A parameter as the model has it, whole."""

    shape: Many[int]
    dtype: str
    nbytes: int


@dataclass(frozen=True, config=_strict, kw_only=True)
class DeviceRun:
    """Equal devices in a row."""

    first: int
    """Global rank."""
    count: int
    device: str
    node_devices: int
    """Of each of their nodes."""
    memory_bytes: int
    room_bytes: int
    """What a plan may use of it."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class StageTraffic:
    """What one rank of a stage sends in a step for one purpose."""

    purpose: TrafficPurpose
    """tensors (inside blocks), gradients, parameters, stages."""
    axis: str
    """`pp`, a mesh axis, `dp` for both data axes, or `tied` for parameters of several stages."""
    link: str
    """The slowest tier that it crosses."""
    nbytes: int
    seconds: float
    """Of the collectives and messages, whether or not anything hides them."""
    form: str = ""
    """The form of synchronisation that sends it; empty: none does."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class SyncMessage:
    """What one rank of a stage sends its replicas in a step, by one row of a form's table."""

    form: str
    """Of `forms/sync`: of the stage, or of some of its parameters."""
    what: Literal["gradients", "parameters"]
    primitive: str
    """Which collective."""
    axis: str
    when: str
    """It goes, and what may hide it, in words."""
    link: str
    """The slowest tier that it crosses."""
    nbytes: int
    seconds: float
    exposed_s: float
    """By which a step is longer than if these took no time; the rest is hidden."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Moving:
    """Bytes that come and go within a step."""

    gradients: int = 0
    activations: int = 0
    communication: int = 0
    workspace: int = 0


@dataclass(frozen=True, config=_strict, kw_only=True)
class StageDetail:
    """What the actions of a stage take and hold."""

    actions: dict[str, float]
    """F, B, I, W, K, R, and `B last`, `W last` that end the stage's backwards; `held`, those that
    find all that they need: mean seconds."""
    saved_bytes: int
    """Per micro-batch in flight."""
    halved_bytes: int
    """Per micro-batch between the halves of its backward; below 0: first halves free more than they
    leave."""
    always: Moving
    begun: Moving
    """From the end of the first backward of a step to that of the last."""
    rises: dict[str, Moving]
    """Most within an action: `F`, `I`, and backwards: `B`, `B first`, `B last`, `B first last`;
    `K`, `R` and the same with `held` where the schedule has such actions; `W` and so on of second
    halves, where the schedule has them."""
    traffic: Many[StageTraffic]
    messages: Many[SyncMessage] = ()
    """Among replicas, in the order in which they go, where the plan names forms for them."""
    entry_bytes: int = 0
    """Of a message from the stage before that is there beside what is saved."""
    border_bytes: int = 0
    """The same of one to the next stage."""
    entry_back_bytes: int | None = None
    """Of the gradients that go back to the stage before; null: as many as come from it."""
    border_back_bytes: int | None = None
    """Of those that come back from the next stage; null: as many as go to it."""
    back_s: float | None = None
    """Of a message with those; null: as the one to the next stage."""
    sent_bytes: int = 0
    """Of what has been sent to that, beside what is saved."""
    shared_bytes: int = 0
    """Of what it has saved, what counts as the stage before's, on the same ranks, while that has
    it."""
    kept_bytes: int = 0
    """Per micro-batch in flight of which all was kept, or has been made again."""
    collectives: dict[str, float] = field(default_factory=dict)
    """Of `actions`, the seconds in collectives inside blocks that the rank waits for at once."""
    pairs: dict[str, float] = field(default_factory=dict)
    """Stage of a backward that a forward of this one runs together with -> mean seconds of both;
    they are no part of `actions`, unless all of a kind run so."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class RankDetail:
    """What a pipeline rank does in a step."""

    starts_s: float
    """Later than the rank that begins the step first."""
    gradients_s: float
    """After the schedule, until they are complete."""
    optimizer_s: float
    publish_s: float
    """Until parameters are there for the next step."""
    seconds: dict[str, float]
    """By category; they sum to the step."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class RowsSaved:
    """Tables of whose gradients the rows that are read go alone, beside the same plan in which they
    go whole, as the rest of their stage's do."""

    tables: Many[str]
    """Module paths of their weights."""
    forms: Many[str]
    share: float
    """Of all their rows, those that a step reads."""
    of: Literal["a rank", "all ranks", ""]
    """Whose samples read so many; empty: one rank's of some tables, all ranks' of others."""
    whole_step_s: float
    """Of a step with whole gradients."""
    whole_wait_s: float
    """By which such a step would wait longer for what replicas send."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class Detail:
    """What reports show beyond the plan's own figures."""

    blocks: Many[BlockName]
    parameters: dict[str, dict[str, ParameterShape]]
    """Block pattern -> `param_key` -> shape."""
    devices: Many[DeviceRun]
    kinds: Many[StageDetail]
    """Stages that differ."""
    stages: Many[int]
    """Stage -> index in `kinds`."""
    ranks: Many[RankDetail]
    meeting_s: float = 0.0
    """Summing the loss over all ranks, between the schedule and what ends the step."""
    overhead_s: float = 0.0
    """Of a step, outside its actions."""
    links: dict[str, float] = field(default_factory=dict)
    """Tier -> bytes per second of a device."""
    model_flops: float = 0.0
    """Of a step, as the model is written: what is made again counts not; 0: not known."""
    peak_flops: float = 0.0
    """What the plan's devices reach together by their data sheets, in a second; 0: not known."""
    rows: RowsSaved | None = None
    """What is saved by rows that go alone; None: no table's do."""

    def stage(self, index: int) -> StageDetail:
        if not 0 <= index < len(self.stages) or not 0 <= self.stages[index] < len(self.kinds):
            raise PlanError(f"the prediction has no detail of stage {index}")
        return self.kinds[self.stages[index]]

    def device(self, rank: int) -> DeviceRun:
        """That of a global rank."""
        for run in self.devices:
            if run.first <= rank < run.first + run.count:
                return run
        raise PlanError(
            f"rank {rank} is not among the {sum(run.count for run in self.devices)} devices that "
            "the prediction is for; predict anew with `meshwright check --model ... -o`"
        )
