"""What a form of synchronisation does in a step, as a table that every model reads.

A row says what happens to gradients or parameters at an event of the step. Models of time, memory
and traffic, bounds and reports branch on what rows say, never on which form they are of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from functools import cached_property
from math import ceil, inf
from typing import Literal

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import Primitive

What = Literal["gradients", "parameters"]
Kind = Literal["gradients", "parameters", "optimizer", "communication", "kept"]
"""`kept`: what the form takes along from step to step, for itself."""
Axis = Literal["dp", "dp_shard", "dp_replicate"]
Unit = Literal["bucket", "block", "stage"]
"""Gradients of some blocks up to a size, those of one block, or all of a stage."""


class Event(IntEnum):
    """A moment of a step, in the order in which a block meets them."""

    BEGIN = 0
    """Before the first forward of the step."""
    BEFORE_FORWARD = 1
    """Of a block, in every micro-batch."""
    BEFORE_BACKWARD = 2
    AFTER_BACKWARD = 3
    """Of a block, in every micro-batch: its gradients have been added."""
    AFTER_LAST = 4
    """The same in the last micro-batch only: none will be added."""
    END = 5
    """All micro-batches are over, and the optimizer has not begun."""
    UPDATED = 6
    """The optimizer has stepped."""
    NEXT_BEGIN = 7
    """Before the first forward of the next step."""
    NEXT_FORWARD = 8
    """Of the first block that reads the parameter, in the next step's first micro-batch."""


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
    """It may go while an earlier block runs (`Stage.prefetch`)."""
    lag: int = 0
    """Steps after its own in which `until` is: whole steps hide it."""
    every: int = 1
    """It goes in one of so many steps."""
    share: str = ""
    """Name of what the plan states of the data (`Exchange.stated`), by which the bytes of the unit
    are multiplied; empty: all of them go."""
    by_rank: bool = False
    """It is the share that one rank hands in, and not all of them together."""

    @property
    def is_late(self) -> bool:
        """Whether the next step's forward hides it."""
        return self.until is Event.NEXT_FORWARD and not self.lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Memory that is read and written, without a message."""

    what: What
    unit: Unit
    at: Event
    moved: float
    """Bytes per byte of the unit."""


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


Row = Send | Rewrite | Hold


@dataclass(frozen=True, eq=False)
class Exchange:
    """The table of one form on one shape of replicas."""

    rows: tuple[Row, ...]
    _: KW_ONLY
    form: str = ""
    """Its key."""
    run_ahead: int = 0
    """Blocks of the next forward whose buckets are on their way while an earlier one runs."""
    bucket_bytes: int | None = None
    """Size at which a bucket is closed; None: that of all forms."""
    agrees: bool = True
    """Whether replicas have the same gradients when the optimizer steps."""
    in_forward_order: bool = False
    """Whether buckets are of parameters as the forward reads them; else as the backward does."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """What the plan states of the data by name, such as the share of rows that occur: what goes
    for each byte of a unit."""

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        return tuple([row for row in self.rows if isinstance(row, Send)])

    @cached_property
    def holds(self) -> tuple[Hold, ...]:
        return tuple([row for row in self.rows if isinstance(row, Hold)])

    def _sends_at(self, event: Event) -> tuple[Send, ...]:
        return tuple([send for send in self.sends if send.at == event and not send.lag])

    @cached_property
    def every_backward(self) -> tuple[Send, ...]:
        """What goes after each backward of a block."""
        return self._sends_at(Event.AFTER_BACKWARD)

    @cached_property
    def last_backward(self) -> tuple[Send, ...]:
        """What goes only after the last backward of a block."""
        return self._sends_at(Event.AFTER_LAST)

    @cached_property
    def at_end(self) -> tuple[Send, ...]:
        return tuple([send for send in self._sends_at(Event.END) if not send.is_late])

    @cached_property
    def published(self) -> tuple[Send, ...]:
        """What goes after the optimizer's step, and has arrived before the next one begins."""
        return tuple([send for send in self._sends_at(Event.UPDATED) if not send.is_late])

    @cached_property
    def late(self) -> tuple[Send, ...]:
        """What goes under the next step's first forward."""
        return tuple([send for send in self.sends if send.is_late])

    @cached_property
    def lagging(self) -> tuple[Send, ...]:
        """What is waited for in a later step."""
        return tuple([send for send in self.sends if send.lag])

    def sent(self, send: Send, nbytes: float, ranks: int = 1) -> float:
        """Returns the bytes that go of a unit of `nbytes` among so many ranks, as the plan states
        the data."""
        if not send.share:
            return nbytes
        return nbytes * self.stated[send.share] * (ranks if send.by_rank else 1)

    @cached_property
    def cleared(self) -> tuple[Rewrite, ...]:
        """What is written after the optimizer's step."""
        return tuple(
            [row for row in self.rows if isinstance(row, Rewrite) and row.at is Event.UPDATED]
        )

    @cached_property
    def fetches(self) -> tuple[Send, ...]:
        """What makes a block's parameters whole before it runs."""
        return self._sends_at(Event.BEFORE_FORWARD) + self._sends_at(Event.BEFORE_BACKWARD)

    @cached_property
    def fetches_forward(self) -> bool:
        return bool(self._sends_at(Event.BEFORE_FORWARD))

    @cached_property
    def fetches_backward(self) -> bool:
        return bool(self._sends_at(Event.BEFORE_BACKWARD))

    @cached_property
    def fetches_ahead(self) -> bool:
        """Whether `Stage.prefetch` has an effect."""
        return any([send.ahead for send in self.fetches])

    @cached_property
    def reduces_blocks(self) -> bool:
        """Whether each block's gradients go alone, and not in buckets of several blocks'."""
        return any([send.unit == "block" for send in self.every_backward + self.last_backward])

    @cached_property
    def packs(self) -> bool:
        """Whether gradients are copied into flat tensors that live until they have arrived."""
        return any([bool(send.packs) for send in self.every_backward + self.last_backward])

    @cached_property
    def axis(self) -> Axis:
        """On which the backward's gradients go; all replicas' if none do."""
        return next((send.axis for send in self.every_backward + self.last_backward), "dp")

    @cached_property
    def sums_into_zeros(self) -> bool:
        """Whether gradients have their place from the beginning: a first one is added to zeros."""
        return any([hold.since is Event.BEGIN for hold in self._gradients])

    @cached_property
    def keeps_whole_gradients(self) -> bool:
        """Whether a micro-batch's whole gradients are there when the next one's are made."""
        return not self.every_backward

    def is_split(self, kind: Kind) -> bool:
        """Whether a rank holds only its part of all of a kind while micro-batches run."""
        return kind in self._split

    def parts(self, kind: Kind, dp_shard: int) -> int:
        """Ranks that share a kind: `dp_shard`, or 1 where each holds all."""
        return dp_shard if kind in self._split else 1

    @cached_property
    def _split(self) -> frozenset[Kind]:
        found = [hold for hold in self.holds if hold.unit == "stage" and hold.part]
        return frozenset([hold.kind for hold in found if hold.since <= Event.AFTER_BACKWARD])

    @cached_property
    def _gradients(self) -> tuple[Hold, ...]:
        return tuple([h for h in self.holds if h.kind == "gradients" and h.unit == "stage"])

    @cached_property
    def begun(self) -> tuple[int, int]:
        """Gradients that a stage holds from its first backward on: (wholes, parts)."""
        return _shares([h for h in self._gradients if h.since is Event.AFTER_BACKWARD])

    @cached_property
    def left(self) -> tuple[int, int]:
        """Gradients beside those there from the beginning, once all have arrived: the same."""
        own = [h for h in self._gradients if Event.BEGIN < h.since <= Event.END < h.until]
        return _shares(own)

    @cached_property
    def kept(self) -> tuple[int, int]:
        """What the form takes along from step to step: (wholes, parts)."""
        return _shares([h for h in self.holds if h.kind == "kept"])

    @cached_property
    def under_way(self) -> tuple[float, float]:
        """Of what is waited for in a later step, what is always under way: the same."""
        found = [0.0, 0.0]
        for send in self.lagging:
            flying = ceil((send.lag + (send.until > send.at)) / send.every)
            found[send.of_part] += flying * self.sent(send, 1)
        return found[0], found[1]

    @cached_property
    def moving_at_end(self) -> tuple[int, int]:
        """Most of its largest bucket at once for messages after the last backward: the same."""
        return _shares([h for h in self.holds if h.kind == "communication"])


def checked(exchange: Exchange) -> Exchange:
    """Returns the table of a form with that of its store, as it is given. PlanError where a row
    breaks a rule that all forms keep, or none of the models can price it."""
    for wrong in _wrong(exchange):
        raise PlanError(wrong)
    return exchange


def _shares(holds: list[Hold]) -> tuple[int, int]:
    return sum([hold.whole for hold in holds]), sum([hold.part for hold in holds])


_ALWAYS = (Event.BEGIN, Event.NEXT_BEGIN, "stage")
_LIVES = {
    "gradients": (Event.AFTER_BACKWARD, Event.AFTER_LAST, Event.END),
    "parameters": (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD, Event.UPDATED),
}
"""When each may go."""


def _wrong(exchange: Exchange) -> Iterator[str]:
    """What breaks a rule, in words: the row, the rule, and what would be legal."""
    for row in exchange.rows:
        if not isinstance(row, Rewrite) and row.until < _start(row) and not _lag(row):
            yield f"{row} ends before it begins: until {_start(row).name} or later"
    for hold in exchange.holds:
        if hold.whole < 0 or hold.part < 0 or not hold.whole + hold.part:
            yield f"{hold} holds nothing: `whole` or `part` must be 1 or more"
        if hold.kind == "communication" and hold.since < Event.END:
            yield f"{hold}: what is on its way before the end follows from its Send; leave it out"
        if hold.kind == "kept" and (hold.since, hold.until, hold.unit) != _ALWAYS:
            yield f"{hold}: what a form keeps is there from BEGIN to NEXT_BEGIN, of a stage"
    for row in exchange.rows:
        if isinstance(row, Rewrite) and (row.at is not Event.UPDATED or row.unit != "bucket"):
            yield f"{row}: only work on buckets after the update has a price"
    for send in exchange.sends:
        yield from _wrong_lag(send) if send.lag else _wrong_send(send)
        if send.share and not 0 < exchange.stated.get(send.share, 0) < inf:
            known = ", ".join(sorted(exchange.stated)) or "nothing"
            yield f"{send}: `stated` has no {send.share} above 0; it has {known}"
    if len(exchange.every_backward + exchange.last_backward) > 1:
        yield "a backward's gradients go in one message: further ones at END"
    if len({(send.primitive, send.axis, send.unpacks) for send in exchange.fetches}) > 1:
        yield "a block's parameters are gathered alike before its forward and its backward"
    if exchange.agrees and not _agrees(exchange):
        yield "replicas must agree on gradients: sums on dp, or on dp_shard and dp_replicate"
    stored = [h for h in exchange.holds if h.kind == "parameters" and h.unit == "stage"]
    if len(stored) != 1:
        yield f"parameters are held {len(stored)} times: their store holds them, and no other row"
    if exchange.is_split("parameters") and not (
        exchange.fetches_forward and exchange.fetches_backward
    ):
        yield "parameters of which a rank holds a part are gathered before forward and backward"
    if exchange.is_split("optimizer") and not (
        exchange.published or exchange.late or exchange.is_split("parameters")
    ):
        yield "parameters that one rank steps reach the others: Send them when UPDATED"


def _wrong_send(send: Send) -> Iterator[str]:
    known = _LIVES[send.what]
    if send.at not in known:
        names = ", ".join([event.name for event in known])
        yield f"{send}: {send.what} go at one of {names}"
    if send.is_late:
        if send.at not in (Event.END, Event.UPDATED):
            yield f"{send}: what the next forward hides goes at END or when UPDATED"
        return
    if send.what == "gradients" and send.until > Event.END:
        yield f"{send}: the optimizer needs gradients; until END, or NEXT_FORWARD if it steps then"
    if send.what == "parameters" and send.until != send.at:
        yield f"{send}: what is gathered is needed at once; until {send.at.name}"
    before_a_block = send.at in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    if before_a_block != (send.unit == "block" and send.what == "parameters"):
        yield f"{send}: before a block runs its own parameters go, elsewhere buckets"
    if send.at in (Event.END, Event.UPDATED) and send.unit != "bucket":
        yield f"{send}: after the last backward, buckets go"
    if send.at is Event.AFTER_BACKWARD and not (send.adds and send.packs):
        yield f"{send}: what goes in every micro-batch is packed, and added up where it arrives"


def _wrong_lag(send: Send) -> Iterator[str]:
    if send.lag < 0:
        yield f"{send} arrives before it goes: lag 0 or more"
    if send.every < 1:
        yield f"{send} goes in one of {send.every} steps: every 1 or more"
    if send.unit != "bucket" or send.at not in (Event.AFTER_LAST, Event.END, Event.UPDATED):
        yield f"{send}: what is waited for in a later step goes in buckets, once in its own"
    if send.adds or send.ahead:
        yield f"{send}: what is waited for in a later step is neither added up nor fetched ahead"


def _lag(row: Row) -> int:
    return row.lag if isinstance(row, Send) else 0


def _start(row: Send | Hold) -> Event:
    return row.at if isinstance(row, Send) else row.since


def _agrees(exchange: Exchange) -> bool:
    axes = {send.axis for send in exchange.sends if send.what == "gradients"}
    return axes in (set(), {"dp"}, {"dp_shard", "dp_replicate"})
