"""Each rank of dp_shard also holds only its part of the gradients (Rajbhandari et al. 2020, stage
2): buckets go after every backward, and what arrives is added up."""

from collections.abc import Sequence

from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Send
from meshwright.forms.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

COPIES = True
FOLDS = True


def describe(replicas: int) -> Exchange:
    """Gradients are whole from a block's backward until their bucket is packed."""
    return Exchange((
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="gradients", unit="bucket", since=Event.AFTER_BACKWARD,
             until=Event.AFTER_BACKWARD, whole=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.UPDATED, until=Event.UPDATED,
             whole=1, part=1),
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="bucket",
             at=Event.AFTER_BACKWARD, until=Event.END, packs="whole", adds=True),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="bucket",
             at=Event.UPDATED, until=Event.UPDATED, packs="part", unpacks=True, ahead=True),
    ))  # fmt: skip


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    return ScatteredEarly(slots, buckets(trainable(slots), BUCKET_BYTES), lines)


class ScatteredEarly(ShardedOptimizer):
    """What has been summed so far is with those who step it, from backward to backward."""

    def after_backward(self, call: int, last: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.owner == call:
                self._start(index)

    def arrived(self) -> Sequence[Tensor]:
        """What has arrived is added to in the next micro-batch."""
        return ()

    def finish(self) -> None:
        self._deliver_all()
