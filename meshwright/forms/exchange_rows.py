"""What a form of synchronisation does with a unit of parameters or gradients, and when: the rows of
its table (`forms.exchange`)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from meshwright.ir.layout.conversions import Primitive

What = Literal["gradients", "parameters"]
Kind = Literal["gradients", "parameters", "optimizer", "communication", "kept"]
"""`kept`: what the form takes along from step to step, for itself."""
Axis = Literal["dp", "dp_shard", "dp_replicate"]
Unit = Literal["bucket", "block", "stage"]
"""Gradients of some blocks up to a size, those of one block, or all of a stage."""


Steps = Literal["", "all", "some"]
"""Of a row, where it is so: what the optimizer steps, all of a rank's part or what has gradients of
it; empty: either."""


class Event(IntEnum):
    """A moment of a step, in the order in which a block meets them."""

    BEGIN = 0
    """Before the first forward of the step."""
    BEFORE_FORWARD = 1
    """Of a block, in every micro-batch."""
    LAST_FORWARD = 2
    """Of a block, in the last micro-batch only: it has run."""
    BEFORE_BACKWARD = 3
    AFTER_BACKWARD = 4
    """Of a block, in every micro-batch: its gradients have been added."""
    AFTER_LAST = 5
    """The same in the last micro-batch only: none will be added."""
    END = 6
    """All micro-batches are over, and the optimizer has not begun."""
    UPDATED = 7
    """The optimizer has stepped."""
    NEXT_BEGIN = 8
    """Before the first forward of the next step."""
    NEXT_FORWARD = 9
    """Of the first block that reads the parameter, in the next step's first micro-batch."""


class Shaped(NamedTuple):
    """A trained parameter on one rank, whole on dp."""

    shape: tuple[int, ...]
    nbytes: int
    reads: float = 0.0
    """Rows (of a batch, positions of an image) that a layer multiplies with it in a step, on a
    rank; 0: none, or nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A collective among the replicas of a stage.

    What is sent before a block runs is that block's parameters, which live while it runs.
    """

    what: What
    primitive: Primitive
    axis: Axis
    unit: Unit
    at: Event
    until: Event
    """When it must have arrived: what runs before that hides it."""
    of_part: bool = False
    """A rank's part of the unit is the value, not the whole unit."""
    packs: Literal["", "whole", "part"] = ""
    """What is first copied into a flat tensor: the whole unit, or this rank's part of it."""
    unpacks: bool = False
    """The whole unit is copied out of a flat tensor once it has arrived."""
    adds: bool = False
    """What has arrived is added to the sum over earlier micro-batches before the next one goes."""
    ahead: bool = False
    """It may go while an earlier block runs (`Stage.prefetch`); what goes when UPDATED, while the
    bucket before it arrives and is unpacked."""
    lag: int = 0
    """Steps after its own in which `until` is: whole steps hide it."""
    every: int = 1
    """It goes in one of so many steps."""
    share: str = ""
    """Name of what the plan states of the data (`Exchange.stated`), by which the bytes of the unit
    are multiplied; empty: all of them go."""
    by_rank: bool = False
    """It is the share that one rank hands in, and not all of them together."""
    times: float = 1.0
    """Bytes that go per byte of the unit as the optimizer steps it; less for copies."""
    joint: bool = False
    """Buckets of all parameters of the stage that have the form go in one message, whatever else
    their settings say; at the end of a step, or when the optimizer has stepped."""
    loaded: str = ""
    """Name of what the plan states of the data: how many times the mean the busiest rank sends or
    gets, for whom all wait; empty: ranks send equally."""

    @property
    def is_late(self) -> bool:
        """Whether the next step's forward hides it."""
        return self.until is Event.NEXT_FORWARD and not self.lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Work without a message: memory that is read and written, and what is computed."""

    what: What
    unit: Unit
    at: Event
    moved: float
    """Bytes per byte of the unit; with `flops` what these products read and write."""
    flops: float = 0.0
    """Of products of matrices, per byte of the unit."""
    calls: float = 0.0
    """Kernels, per tensor of the unit."""
    steps: Steps = ""
    thin: bool = True
    """One of the matrices has few columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Memory that is taken from one event to another."""

    kind: Kind
    since: Event
    until: Event
    unit: Unit = "stage"
    """The largest one, where it is not the stage."""
    whole: int = 0
    """How many units."""
    part: int = 0
    """How many of a rank's parts of a unit."""
    share: str = ""
    """As of `Send`; not of parameters or the optimizer's state."""
    times: float = 1.0
    """As of `Send`."""
    steps: Steps = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What a rank steps of a kind lies in the host's memory: parameters, their gradients, or the
    optimizer's state."""

    kind: Kind
    too: bool = False
    """It is on the device too."""
    as_read: bool = False
    """Where blocks read copies, the device has these alone, made by the host."""
    share: str = ""
    """Name of what the plan states: the share of it that the device has too."""
    steps: Steps = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """What a rank steps goes over the link between its device and the host, block by block."""

    what: What
    to: Literal["host", "device"]
    at: Event
    until: Event
    """When it must have arrived: what runs before that hides it."""
    every: bool = False
    """In every micro-batch, and not only in the last or the first."""
    times: float = 1.0
    """Bytes that go per byte of what is stepped; less for copies."""
    share: str = ""
    """As of `Send`: of rows, which go in no order of blocks."""
    state: bool = False
    """What the optimizer keeps of it goes too."""
    steps: Steps = ""


Row = Send | Rewrite | Hold | Hosted | HostCopy
