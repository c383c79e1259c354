"""Each rank of dp_shard holds only its part of all (Rajbhandari et al. 2020, stage 3): a block's
gradients go after every backward, to the ranks that store their rows."""

from collections.abc import Sequence
from typing import cast

from meshwright.forms.arriving import ArrivingSums
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Send
from meshwright.forms.flat import sum_over_copies
from meshwright.forms.running import Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.forms.storage.shards import Shards, ShardUnit
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

STORE = "shards"
SPLIT = True
COPIES = True
FOLDS = True


def describe(replicas: int) -> Exchange:
    """After the last backward, the largest block's flat gradients are there twice at most."""
    return Exchange((
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="gradients", unit="block", since=Event.AFTER_BACKWARD,
             until=Event.AFTER_BACKWARD, whole=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=2),
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="block",
             at=Event.AFTER_BACKWARD, until=Event.END, packs="whole", adds=True),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
    ))  # fmt: skip


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    return _Scattered(cast(Shards, store), lines)


class _Scattered(SyncRun):
    def __init__(self, store: Shards, lines: Lines) -> None:
        self._lines, self.held = lines, store.held
        self._units = [unit for unit in store.units if unit.is_trained]
        self._arriving = ArrivingSums[ShardUnit]()
        self._opened = 0

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._arriving.clear()
        for unit in self._units:
            for slot, shard in zip(unit.bucket.slots, unit.shards, strict=True):
                slot.whole.grad = shard.grad = None

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        if call > self._opened:
            # What the backward before this forward left has had the time of a block.
            self._arriving.collect(keep=0)
        self._opened = call

    before_backward = before_forward

    def after_backward(self, call: int, last: bool) -> None:
        for unit in self._units:
            bucket = unit.bucket
            if bucket.owner == call:
                self._arriving.collect(keep=1)
                flat, work = bucket.scatter([slot.whole.grad for slot in bucket.slots])
                self._arriving.send(unit, flat, work)
                for slot in bucket.slots:
                    slot.whole.grad = None

    def finish(self) -> None:
        self._arriving.collect(keep=0)
        for unit, flat in self._arriving.take():
            sum_over_copies(flat, self._lines)
            for shard, view in zip(unit.shards, unit.bucket.views(flat), strict=True):
                shard.grad = view.to(shard.dtype)
