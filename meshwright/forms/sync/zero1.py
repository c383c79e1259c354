"""Each rank of dp_shard sums, holds the optimizer state of, and steps its part of the parameters
(Rajbhandari et al. 2020, stage 1): buckets go as blocks finish in the last backward."""

from collections.abc import Sequence

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Send
from meshwright.forms.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

COPIES = True
FOLDS = True


def describe(replicas: int) -> Exchange:
    """Gradients are whole until their bucket is packed; new parameters are gathered at once."""
    return Exchange((
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.AFTER_LAST, whole=1),
        Hold(kind="gradients", since=Event.AFTER_LAST, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.UPDATED, until=Event.UPDATED,
             whole=1, part=1),
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="bucket",
             at=Event.AFTER_LAST, until=Event.END, packs="whole"),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="bucket",
             at=Event.UPDATED, until=Event.UPDATED, packs="part", unpacks=True, ahead=True),
    ))  # fmt: skip


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    return ShardedOptimizer(slots, buckets(trainable(slots), BUCKET_BYTES), lines)
