"""DeAR: the second half of the all-reduce goes under the next step's forward (Zhang et al. 2023).

Gradients are reduce-scattered under the backward, as soon as their bucket is complete. With zero 1
each rank steps its rows, and gathers *parameters* before the next forward reads them. With zero 0
it gathers *gradients* instead, and steps a bucket whole when they have come, with the settings that
the optimizer had at its step. What reads parameters otherwise waits for all of them (`settle`).

A bucket is consecutive parameters in the order of the forward. Its gather is waited for by the
first block that reads one of them, and begins `ahead` blocks earlier.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Send
from meshwright.forms.flat import (
    BUCKET_BYTES,
    ShardedBucket,
    ShardedGradients,
    ShardedOptimizer,
    held_whole,
    trainable,
)
from meshwright.forms.running import (
    BucketSizes,
    Held,
    LaterStep,
    Lines,
    ParameterStore,
    Slot,
    SyncRun,
)
from meshwright.forms.settings import FormSettings, Number, wrong_settings
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage

_SETTINGS = {"ahead": Number(1, 1, 2**20), "bucket_bytes": Number(BUCKET_BYTES, 1, 2**50)}
EXACT = True
FOLDS = True


def copies(zero: int) -> bool:
    """Tells whether copies of parameters are sent and kept here: where these are gathered."""
    return bool(zero)


def offers(parameters: Sequence[int]) -> Mapping[str, Sequence[int]]:
    """Returns the values of each setting that are worth trying in a stage whose parameters have so
    many bytes: buckets of all of them, then ever smaller ones, down to the smallest alone.

    Sizes are powers of 4: predicted steps differ little over such a factor.
    """
    least, most = min(parameters).bit_length() // 2, -(-sum(parameters).bit_length() // 2)
    return {
        "bucket_bytes": tuple(4**exponent for exponent in range(most, least - 1, -1)),
        "ahead": (1, 2, 4, 8),
    }


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is sent and held; the next step's forward hides the gather."""
    told, sharded = FormSettings(_SETTINGS, settings), bool(zero)
    ahead, bucket_bytes = told.whole("ahead"), told.whole("bucket_bytes")
    gradients = (
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.AFTER_LAST, whole=1),
        Hold(kind="gradients", since=Event.AFTER_LAST, until=Event.NEXT_BEGIN, part=1),
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER,
             axis="dp_shard" if sharded else "dp", unit="bucket", at=Event.AFTER_LAST,
             until=Event.END, packs="whole"),
    )  # fmt: skip
    if not sharded:
        return Exchange((
            *gradients,
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="communication", unit="bucket", since=Event.END, until=Event.UPDATED,
                 whole=2),
            Send(what="gradients", primitive=Primitive.ALL_GATHER, axis="dp", unit="bucket",
                 at=Event.END, until=Event.NEXT_FORWARD, unpacks=True),
        ), run_ahead=ahead, bucket_bytes=bucket_bytes, in_forward_order=True)  # fmt: skip
    return Exchange((
        *gradients,
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.UPDATED, until=Event.UPDATED,
             whole=1, part=1),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="bucket",
             at=Event.UPDATED, until=Event.NEXT_FORWARD, packs="part", unpacks=True),
    ), run_ahead=ahead, bucket_bytes=bucket_bytes, in_forward_order=True)  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    if stage.zero > 1:
        message = f"zero {stage.zero} has its own time for gathers; dear moves those of zero 0 or 1"
        yield message, "zero 1, or no sync"
    yield from wrong_settings("dear", _SETTINGS, stage.sync.settings if stage.sync else {})


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    kind = _ParametersLate if stage.is_sharded else _GradientsLate
    return kind(slots, lines, told.whole("ahead"), told.whole("bucket_bytes"))


def in_forward_order(slots: Sequence[Slot], limit_bytes: int) -> list[list[Slot]]:
    """Returns consecutive slots of one dtype, in the order in which the forward first reads them.

    A bucket is closed when it has `limit_bytes`; with 1, each parameter has its own.
    """
    found: list[list[Slot]] = []
    for dtype in dict.fromkeys(slot.whole.dtype for slot in slots):
        nbytes = limit_bytes
        for slot in sorted(slots, key=lambda slot: slot.owner):
            if slot.whole.dtype == dtype:
                if nbytes >= limit_bytes:
                    found.append([])
                    nbytes = 0
                found[-1].append(slot)
                nbytes += slot.stepped_bytes
    return found


@dataclass(frozen=True, eq=False)
class _Late:
    """Buckets whose gather the next forward waits for."""

    buckets: Sequence[ShardedBucket]
    ahead: int
    gather: Callable[[int], tuple[Tensor, Waitable]]
    """Starts the gather of a bucket."""
    land: Callable[[int, Tensor, Waitable], None]
    """Waits for it, and does what is to be done."""
    due: dict[int, tuple[Tensor, Waitable] | None]
    """None: the gather has not begun."""

    def owe(self) -> None:
        """All buckets are due; those of the first blocks begin."""
        self.due.update(dict.fromkeys(range(len(self.buckets))))
        self._begin(range(self.ahead))

    def before(self, call: int) -> None:
        """A block is about to be entered, for the first time since or not."""
        if not self.due:
            return
        for index in [i for i in self.due if call in self.buckets[i].calls]:
            self._arrive(index)
        self._begin(range(call + 1, call + 1 + self.ahead))

    def settle(self) -> None:
        """Nothing is due any more."""
        for index in list(self.due):
            self._arrive(index)

    def _begin(self, calls: range) -> None:
        # By first reader: a shared parameter has come when a later block reads it again.
        for index, moving in self.due.items():
            if moving is None and self.buckets[index].owner in calls:
                self.due[index] = self.gather(index)

    def _arrive(self, index: int) -> None:
        whole, work = self.due.pop(index) or self.gather(index)
        self.land(index, whole, work)


class _Settling(ShardedGradients):
    """Work of a step that the next forward waits for, block by block, or whoever reads before."""

    _late: _Late
    _bucket_bytes: int

    @property
    def bucket_sizes(self) -> tuple[BucketSizes, ...]:
        sizes = [slot.stepped_bytes for bucket in self._buckets for slot in bucket.slots]
        low = max(1, min(sizes, default=1))
        return (BucketSizes(self._bucket_bytes, low, max(low, sum(sizes))),)

    def regroup(self, bucket_bytes: int) -> None:
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self.cut(in_forward_order(slots, bucket_bytes))
        self._late = replace(self._late, buckets=self._buckets)
        self._bucket_bytes = bucket_bytes

    @property
    def is_settled(self) -> bool:
        return not self._late.due

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        super().before_forward(call, ahead)
        self._late.before(call)

    def settle(self) -> None:
        self._late.settle()


class _ParametersLate(_Settling, ShardedOptimizer):
    def __init__(self, slots: Sequence[Slot], lines: Lines, ahead: int, bucket_bytes: int) -> None:
        groups = in_forward_order(trainable(slots), bucket_bytes)
        ShardedOptimizer.__init__(self, slots, groups, lines)
        self._bucket_bytes = bucket_bytes
        self._late = _Late(self._buckets, ahead, self._gather, self._land, {})

    def written(self) -> None:
        self._late.owe()


class _GradientsLate(_Settling):
    whole_updates = False

    def __init__(self, slots: Sequence[Slot], lines: Lines, ahead: int, bucket_bytes: int) -> None:
        groups = in_forward_order(trainable(slots), bucket_bytes)
        super().__init__(groups, lines, lines.replicas)
        self._bucket_bytes = bucket_bytes
        self.held = held_whole(slots, lines)
        self._rows = self.held_rows()
        self._summed: dict[int, Tensor] = {}
        """Flat shards of gradients that are to be gathered."""
        self._late = _Late(self._buckets, ahead, self._gather, self._land, {})
        self._update: LaterStep | None = None

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self._rows

    def _deliver(self, index: int, flat: Tensor) -> None:
        super()._deliver(index, flat)
        self._summed[index] = flat

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._update = later()
        self._late.owe()

    def _gather(self, index: int) -> tuple[Tensor, Waitable]:
        for shard in self._shards[index]:
            shard.grad = None
        return self._buckets[index].gather(self._summed.pop(index), "gradients")

    def _land(self, index: int, whole: Tensor, work: Waitable) -> None:
        work.wait()
        wholes = [slot.whole for slot in self._buckets[index].slots]
        gradients = [torch.empty_like(x) for x in wholes]
        self._buckets[index].unpack(whole, gradients)
        for x, gradient in zip(wholes, gradients, strict=True):
            x.grad = gradient
        assert self._update is not None
        self._update(wholes)
        for x in wholes:
            x.grad = None
