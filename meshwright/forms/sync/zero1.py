"""ZeRO-1: the optimizer is sharded over dp_shard; gradients are whole until the step ends."""

from collections.abc import Sequence

from meshwright.forms.sync.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.sync.running import Lines, Slot, SyncRun
from meshwright.ir.plan import Stage


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> SyncRun:
    """Returns what runs the form in a stage."""
    return ShardedOptimizer(slots, buckets(trainable(slots), BUCKET_BYTES), lines)
