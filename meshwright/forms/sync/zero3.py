"""Each rank of dp_shard holds only its part of all (Rajbhandari et al. 2020, stage 3): a block's
parameters are gathered before it runs, its gradients go after every backward."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshwright.forms.exchange import Event, Exchange, Hold, Send
from meshwright.forms.flat import ShardedBucket, buckets, frozen, sum_over_copies, trainable
from meshwright.forms.running import Held, Lines, Samples, Slot, SyncRun
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage


def describe(replicas: int) -> Exchange:
    """After the last backward, the largest block's flat gradients are there twice at most."""
    gathers = [
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="block",
             at=event, until=event, unpacks=True, ahead=True)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    ]  # fmt: skip
    return Exchange((
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="gradients", unit="block", since=Event.AFTER_BACKWARD,
             until=Event.AFTER_BACKWARD, whole=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=2),
        *gathers,
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="block",
             at=Event.AFTER_BACKWARD, until=Event.END, packs="whole", adds=True),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
    ))  # fmt: skip


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> SyncRun:
    """Returns what runs the form in a stage."""
    return _Sharded(slots, lines)


class _Unit:
    """The parameters that one call owns, in one dtype."""

    def __init__(self, bucket: ShardedBucket) -> None:
        self.bucket = bucket
        slots = bucket.slots
        whole = bucket.pack([slot.whole.detach() for slot in slots])
        self.flat = whole[bucket.peers.coordinate].clone()
        """This rank's part of the parameters; the optimizer's tensors are views of it."""
        self.shards = [
            nn.Parameter(view, requires_grad=slot.param.requires_grad)
            for slot, view in zip(slots, bucket.views(self.flat), strict=True)
        ]
        self.users = 0
        self._arriving: tuple[Tensor, Waitable] | None = None
        self.sum: Tensor | None = None
        self._bytes = [slot.whole.untyped_storage().nbytes() for slot in slots]
        self._free()

    def fetch(self) -> None:
        """Starts to gather, unless the parameters are there or on their way."""
        if not self.users and self._arriving is None:
            self._arriving = self.bucket.gather(self.flat)

    def open(self) -> None:
        self.fetch()
        self.users += 1
        if self._arriving is None:
            return
        flat, pending = self._arriving
        self._arriving = None
        pending.wait()
        for slot, nbytes in zip(self.bucket.slots, self._bytes, strict=True):
            slot.whole.untyped_storage().resize_(nbytes)
        # `.data` has its own version counter: refilling does not look like a change to autograd.
        self.bucket.unpack(flat, [slot.whole.data for slot in self.bucket.slots])

    def close(self) -> None:
        self.users -= 1
        if not self.users:
            self._free()

    def _free(self) -> None:
        for slot in self.bucket.slots:
            slot.whole.untyped_storage().resize_(0)

    def add(self, flat: Tensor) -> None:
        self.sum = flat if self.sum is None else self.sum.add_(flat)


class _Sharded(SyncRun):
    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        self._lines = lines
        self._units = [
            _Unit(ShardedBucket(bucket, lines, lines.shards))
            for group in (trainable(slots), frozen(slots))
            for bucket in buckets(group, 0)
        ]
        self._of_call: dict[int, list[_Unit]] = {}
        self._works: list[tuple[_Unit, Tensor, Waitable]] = []
        self._opened = 0
        self.held = tuple(
            Held(
                slot.param,
                lines.stage,
                shard,
                unit.bucket.rows(slot),
                lines.is_primary(slot.param, "dp_replicate"),
            )
            for unit in self._units
            for slot, shard in zip(unit.bucket.slots, unit.shards, strict=True)
        )

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for unit in self._units:
            unit.sum = None
            for slot, shard in zip(unit.bucket.slots, unit.shards, strict=True):
                slot.whole.grad = shard.grad = None

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        if call > self._opened:
            # What the backward before this forward left has had the time of a block.
            self._collect(keep=0)
        self._opened = call
        for unit in self._units_of(call):
            unit.open()
        for later in ahead:
            for unit in self._units_of(later):
                unit.fetch()

    before_backward = before_forward

    def close(self, call: int) -> None:
        for unit in self._units_of(call):
            unit.close()

    def _units_of(self, call: int) -> list[_Unit]:
        if call not in self._of_call:
            self._of_call[call] = [
                unit for unit in self._units if any(call in s.calls for s in unit.bucket.slots)
            ]
        return self._of_call[call]

    def after_backward(self, call: int, last: bool) -> None:
        for unit in self._units:
            bucket = unit.bucket
            if bucket.owner == call and bucket.slots[0].param.requires_grad:
                self._collect(keep=1)
                flat, work = bucket.scatter([slot.whole.grad for slot in bucket.slots])
                self._works.append((unit, flat, work))
                for slot in bucket.slots:
                    slot.whole.grad = None

    def _collect(self, keep: int) -> None:
        while len(self._works) > keep:
            unit, flat, work = self._works.pop(0)
            work.wait()
            unit.add(flat)

    def finish(self) -> None:
        self._collect(keep=0)
        for unit in self._units:
            if unit.sum is None:
                continue
            sum_over_copies(unit.sum, self._lines)
            for shard, view in zip(unit.shards, unit.bucket.views(unit.sum), strict=True):
                shard.grad = view
