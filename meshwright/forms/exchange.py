"""What a form of synchronisation does in a step, as a table that every model reads.

A row says what happens to gradients or parameters at an event of the step. Models of time, memory
and traffic, bounds and reports branch on what rows say, never on which form they are of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import ceil

from meshwright.forms.exchange_rows import (
    Axis,
    Event,
    Hold,
    HostCopy,
    Hosted,
    Kind,
    Rewrite,
    Row,
    Send,
    Steps,
)


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
    apart: bool = False
    """Whether replicas along dp_replicate train alone: what forward makes of several samples, such
    as the statistics of batch-norms, is of a replica's own."""
    stepped: str = ""
    """Name of what the plan states of the data: the share of a rank's part that has a gradient;
    that alone is stepped where a gradient of zero changes nothing. Empty: all is."""
    in_forward_order: bool = False
    """Whether buckets are of parameters as the forward reads them; else as the backward does."""
    largest: float = 0.0
    """Where a rank's part is whole parameters, that it owns: the share that the rank with most of
    them has; 0: a part is rows of each, as many as of any other rank."""
    busiest: float = 0.0
    """The same of the work of stepping them."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """What the plan states of the data by name, such as the share of rows that occur: what goes
    for each byte of a unit."""
    copied: float = 0.0
    """Bytes of the copy that blocks read of a parameter, per byte of what the optimizer steps; 0:
    they read that (`forms.copied`)."""
    summed: float = 1.0
    """Bytes of a gradient's sum, until the optimizer steps, per byte of what that steps."""
    copies_apart: bool = False
    """Whether the form knows nothing of copies: gradients of a block are added at once to those of
    what is stepped."""
    leaves_at_end: bool = False
    """Whether gradients go to the host when the step ends, as somebody else adds to them then."""

    @cached_property
    def staying(self) -> "Exchange":
        """The same of gradients that are summed over a model axis, or with another stage: they are
        whole when the step ends, and go to the host then."""
        rows = [
            replace(row, at=Event.AFTER_LAST, every=False, times=1.0)
            if isinstance(row, HostCopy) and row.what == "gradients" else row
            for row in self.rows
        ]  # fmt: skip
        return replace(self, rows=tuple(rows), leaves_at_end=True)

    def stepping(self, *, some: bool) -> "Exchange":
        """Returns what is done where what has no gradient is not stepped (`some`), or is."""
        if not self.stepped:
            return self
        rows = [
            row for row in self.rows
            if isinstance(row, Send) or _is_so(row.steps, some)
        ]  # fmt: skip
        return replace(self, rows=tuple(rows), stepped=self.stepped if some else "")

    @cached_property
    def stepped_share(self) -> float:
        """Of a rank's part of what it steps."""
        return self.stated[self.stepped] if self.stepped else 1.0

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        return tuple([row for row in self.rows if isinstance(row, Send)])

    @cached_property
    def holds(self) -> tuple[Hold, ...]:
        return tuple([row for row in self.rows if isinstance(row, Hold)])

    @cached_property
    def hosted(self) -> frozenset[Kind]:
        """Kinds of what a rank steps that are on the host, and not on the device."""
        rows = [row for row in self.rows if isinstance(row, Hosted)]
        return frozenset([row.kind for row in rows if not row.too and not row.share])

    def here(self, kind: Kind) -> float:
        """Returns the share of what a rank steps of a kind that is on the device."""
        shares = [
            self.stated[row.share] if row.share else float(row.too)
            for row in self.rows if isinstance(row, Hosted) and row.kind == kind
        ]  # fmt: skip
        return shares[0] if shares else 1.0

    @cached_property
    def on_host(self) -> frozenset[Kind]:
        """Kinds of what a rank steps that are on the host."""
        return frozenset([row.kind for row in self.rows if isinstance(row, Hosted)])

    @cached_property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """What goes whole, in the order of blocks."""
        return tuple([r for r in self.rows if isinstance(r, HostCopy) and not r.share])

    @cached_property
    def row_copies(self) -> tuple[HostCopy, ...]:
        """What goes of rows of tables."""
        return tuple([row for row in self.rows if isinstance(row, HostCopy) and row.share])

    def copied_at(self, *events: Event) -> bool:
        """Whether something goes over the host's link at one of these events."""
        return any([copy.at in events for copy in self.host_copies])

    @cached_property
    def gradients_leave_early(self) -> bool:
        """Whether gradients go to the host as blocks finish in the last backward."""
        hosted = "gradients" in self.hosted and not self.leaves_at_end
        return hosted and not self.every_backward

    @cached_property
    def gradients_leave_each(self) -> bool:
        """Whether they go to the host in every micro-batch."""
        return self.copied_at(Event.AFTER_BACKWARD)

    @cached_property
    def gradients_are_freed(self) -> bool:
        """Whether they are then held no longer on the device: where no flat tensor has them."""
        return self.gradients_leave_early and not self.sums_into_zeros

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
    def beside_gradients(self) -> tuple[Send, ...]:
        """What goes with the gradients that a backward has completed, after these."""
        return (self.every_backward + self.last_backward)[1:]

    @cached_property
    def last_forward(self) -> tuple[Send, ...]:
        """What goes once a block has run forward for the last time in a step."""
        return self._sends_at(Event.LAST_FORWARD)

    @cached_property
    def at_end(self) -> tuple[Send, ...]:
        return tuple([send for send in self._sends_at(Event.END) if not send.is_late])

    @cached_property
    def published(self) -> tuple[Send, ...]:
        """What goes after the optimizer's step, and has arrived before the next one begins."""
        return tuple([send for send in self._sends_at(Event.UPDATED) if not send.is_late])

    @cached_property
    def published_at_once(self) -> int:
        """Buckets under way at once after the optimizer's step."""
        return 2 if any([send.ahead for send in self.published]) else 1

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
            return nbytes * send.times
        return nbytes * send.times * self.stated[send.share] * (ranks if send.by_rank else 1)

    def load(self, send: Send) -> float:
        """Returns how many times the bytes of the mean rank the busiest one sends or gets."""
        return self.stated[send.loaded] if send.loaded else 1.0

    def work_at(self, event: Event) -> tuple[Rewrite, ...]:
        """Returns what is done at an event without a message."""
        return tuple([row for row in self.rows if isinstance(row, Rewrite) and row.at is event])

    @cached_property
    def cleared(self) -> tuple[Rewrite, ...]:
        """What is written after the optimizer's step."""
        return self.work_at(Event.UPDATED)

    @cached_property
    def worked_forward(self) -> tuple[Rewrite, ...]:
        """What forwards do beside their ops with a bucket, in all of a step."""
        return self.work_at(Event.LAST_FORWARD)

    @cached_property
    def worked_last(self) -> tuple[Rewrite, ...]:
        """What is done with a bucket before it goes after the last backward."""
        return self.work_at(Event.AFTER_LAST)

    @cached_property
    def worked_at_end(self) -> tuple[Rewrite, ...]:
        """What is done with a bucket before the optimizer steps."""
        return self.work_at(Event.END)

    @cached_property
    def fetches(self) -> tuple[Send, ...]:
        """What makes a block's parameters whole before it runs."""
        return self._sends_at(Event.BEFORE_FORWARD) + self._sends_at(Event.BEFORE_BACKWARD)

    @cached_property
    def fetches_forward(self) -> bool:
        return bool(self._sends_at(Event.BEFORE_FORWARD)) or self.comes_from_host

    @cached_property
    def fetches_backward(self) -> bool:
        return bool(self._sends_at(Event.BEFORE_BACKWARD)) or self.comes_from_host

    @cached_property
    def comes_from_host(self) -> bool:
        """Whether a block's parameters come from the host before it runs, in each direction."""
        return self.copied_at(Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)

    @cached_property
    def refills(self) -> bool:
        """Whether parameters have no values while no block runs that reads them."""
        return bool(self.fetches) or self.comes_from_host

    @cached_property
    def fetches_ahead(self) -> bool:
        """Whether `Stage.prefetch` has an effect."""
        return any([send.ahead for send in self.fetches]) or self.comes_from_host

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
        return not self.every_backward and not self.gradients_leave_each

    def is_split(self, kind: Kind) -> bool:
        """Whether a rank holds only its part of all of a kind while micro-batches run."""
        return kind in self._split

    def parts(self, kind: Kind, dp_shard: int) -> float:
        """Returns by what a kind is divided: the ranks that share it, or 1 where each holds all."""
        return self.ways(dp_shard) if kind in self._split else 1

    def ways(self, dp_shard: int) -> float:
        """Returns by what a value is divided of which each rank has a part, to get the largest."""
        return 1 / self.largest if self.largest else dp_shard

    @property
    def owns_whole(self) -> bool:
        """Whether a rank's part is whole parameters, each of which has one owner."""
        return self.largest > 0.0

    def parameter_bytes(self, trained: float, dp_shard: int) -> float:
        """Returns what a rank holds of trained parameters, copies included, while no block runs;
        `trained`: bytes of all as the optimizer steps them."""
        if self.is_split("parameters") or not self.copied:
            share = self.copied if self.copies_on_host else 1.0
            return share * trained / self.parts("parameters", dp_shard)
        if self.copies_on_host:
            return trained * self.copied
        parts = 1.0 if self.copies_apart else self.parts("optimizer", dp_shard)
        return trained * self.copied + trained / parts

    @property
    def copies_on_host(self) -> bool:
        """Whether the host has what it steps and the copies that blocks read of it, and the device
        has these alone."""
        made = self.copies_apart and "parameters" in self.on_host and not self.row_copies
        return made or (self.copied > 0.0 and self.has_as_read)

    @cached_property
    def has_as_read(self) -> bool:
        """Whether the host makes copies of a rank's part, where blocks read copies."""
        return any([isinstance(row, Hosted) and row.as_read for row in self.rows])

    @cached_property
    def read(self) -> float:
        """Bytes that blocks read of a parameter, and make of its gradient, per byte as stepped."""
        return self.copied or 1.0

    @cached_property
    def _split(self) -> frozenset[Kind]:
        found = [hold for hold in self.holds if hold.unit == "stage" and hold.part]
        return frozenset([hold.kind for hold in found if hold.since <= Event.AFTER_BACKWARD])

    @cached_property
    def _gradients(self) -> tuple[Hold, ...]:
        return tuple([h for h in self.holds if h.kind == "gradients" and h.unit == "stage"])

    @cached_property
    def begun(self) -> tuple[float, float]:
        """Gradients that a stage holds from its first backward on: (wholes, parts)."""
        if self.gradients_leave_each:
            return 0.0, 0.0
        wholes, parts = self._held([h for h in self._gradients if h.since is Event.AFTER_BACKWARD])
        return wholes * self.summed, parts * self.summed

    @cached_property
    def made(self) -> float:
        """Share of a parameter of which blocks make a gradient, as the plan states the data."""
        own = [h.share for h in self._gradients if h.since is Event.AFTER_BACKWARD and h.whole]
        return self.stated[own[0]] if own and own[0] else 1.0

    @cached_property
    def left(self) -> tuple[float, float]:
        """Gradients beside those there from the beginning, once all have arrived: the same."""
        if self.gradients_are_freed:
            return 0.0, 0.0
        own = [h for h in self._gradients if Event.BEGIN < h.since <= Event.END < h.until]
        return self._held(own)

    @cached_property
    def kept(self) -> tuple[float, float]:
        """What the form takes along from step to step: (wholes, parts)."""
        return self._held([h for h in self.holds if h.kind == "kept"])

    def _held(self, holds: Sequence[Hold]) -> tuple[float, float]:
        """Wholes and parts, as the plan states the data."""
        found = [(h, h.times * (self.stated[h.share] if h.share else 1.0)) for h in holds]
        wholes, parts = [s * h.whole for h, s in found], [s * h.part for h, s in found]
        return sum(wholes), sum(parts)

    @cached_property
    def under_way(self) -> tuple[float, float]:
        """Of what is waited for in a later step, what is always under way: the same."""
        found = [0.0, 0.0]
        for send in self.lagging:
            flying = ceil((send.lag + (send.until > send.at)) / send.every)
            found[send.of_part] += flying * self.sent(send, 1)
        return found[0], found[1]

    @cached_property
    def moving_at_end(self) -> tuple[float, float]:
        """Most of its largest bucket at once for messages after the last backward: the same."""
        return self._held([h for h in self.holds if h.kind == "communication"])


def _is_so(steps: Steps, some: bool) -> bool:
    return steps == "" or some == (steps == "some")
