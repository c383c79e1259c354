"""Each parameter is whole at its owner, a rank of dp_shard; those of a block are gathered before it
runs, and let go after it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.forms.exchange_rows import Row
from meshwright.forms.flat import buckets, frozen, trainable
from meshwright.forms.owner_bucket import OwnerBucket, owners_of_slots
from meshwright.forms.running import Lines, ParameterStore, Slot
from meshwright.forms.storage import shards
from meshwright.ir.plan.plan import Setting, Stage

SPLIT = True


def describe(
    replicas: int, settings: Mapping[str, Setting] = MappingProxyType({})
) -> tuple[Row, ...]:
    """Returns what is held, and the gathers: as where each rank has rows of each parameter."""
    return shards.describe(replicas)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns what this rank owns; `whole` of the slots is empty while no block runs."""
    owners = owners_of_slots(slots, lines, stage)
    groups = [group for part in (trainable(slots), frozen(slots)) for group in buckets(part, 0)]
    made = [OwnerBucket(group, lines, lines.shards, owners) for group in groups]
    return shards.Shards([shards.ShardUnit(bucket) for bucket in made], lines)
