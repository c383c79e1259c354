"""Each parameter has one owner among the ranks of dp_shard, who sums its gradient, holds its
optimizer state, steps it whole and hands it on.

For optimizers whose step looks at a whole matrix: Muon (Jordan et al. 2024), its sharded forms and
Distributed Shampoo share out matrices so. Owners are found by `forms.placing` from the shapes of
parameters alone, so that every rank and every price finds the same, and no plan has to list them;
`balance` says what is evened out. With zero 2 gradients go to owners after each backward, and with
zero 3 parameters are at their owners only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.owner_bucket import SETTINGS, OwnerBucket, owners_of, owners_of_slots
from meshwright.forms.placing import weight
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, wrong_settings
from meshwright.forms.sync import zero1, zero2, zero3
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SHAPES = SHARDS = OWNERS = True
SEARCHED = False
_LEVELS = {1: zero1, 2: zero2, 3: zero3}
"""What is at owners goes when it goes where rows are shared out."""


def store(zero: int) -> str:
    """Returns the store that it takes where a plan names none."""
    return "at_owner" if zero == 3 else "whole"


def splits(zero: int) -> bool:
    """Whether it takes stores of which a rank has its part."""
    return zero == 3


def describe(
    replicas: int,
    zero: int = 1,
    settings: Mapping[str, Setting] = MappingProxyType({}),
    shapes: Sequence[Shaped] = (),
    shards: int = 0,
) -> Exchange:
    """Returns what is held and sent; `largest` and `busiest` of no shapes are those of equal
    parts. `shards`: ranks that own something, all replicas if 0."""
    made: Exchange = _LEVELS.get(zero, zero1).describe(replicas)
    ranks = shards or replicas
    largest = busiest = 1 / ranks
    if shapes:
        kind = FormSettings(SETTINGS, settings).word("balance")
        found = [x.shape for x in shapes]
        owners = owners_of(found, ranks, kind)
        largest = _most(owners, [float(prod(shape)) for shape in found], ranks)
        busiest = _most(owners, [weight(shape, kind) for shape in found], ranks)
    return replace(made, largest=largest, busiest=busiest)


def _most(owners: Sequence[int], sizes: Sequence[float], ranks: int) -> float:
    """The share of the rank that has most."""
    sums = [0.0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        sums[owner] += size
    return max(sums) / sum(sums) if any(sums) else 1 / ranks


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("by_owner", SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero not in _LEVELS:
        yield f"by_owner leaves state to owners, and zero is {stage.zero}", "zero 1"
    elif stage.dp > 1 and not stage.is_sharded:
        yield "by_owner shares parameters out over dp_shard, which is 1", f"dp_shard {stage.dp}"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    if stage.zero == 3:
        return zero3.build(slots, lines, stage, store)
    owners = owners_of_slots(slots, lines, stage)
    kind = zero2.ScatteredEarly if stage.zero == 2 else ShardedOptimizer
    groups = buckets(trainable(slots), BUCKET_BYTES)
    return kind(slots, groups, lines, partial(OwnerBucket, owners=owners))
