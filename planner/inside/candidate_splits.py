"""Which splits of each op are worth considering: those that a neighbour's split leads to.

A linear layer could split its columns in any sections; that three equal sections make sense it
learns from the `split` behind it. So placements spread along the values of a run of ops, from op to
op through their factors, until nothing new appears.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.rules import Dims, Rule
from meshwright.ir.layout.layout import Shard
from meshwright.planner.inside.factors import (
    AxisKind,
    Split,
    Taken,
    allowed,
    natural_splits,
    shard_of,
    split_of,
    with_together,
)

Shards = dict[str, dict[Shard, None]]
"""Value -> placements it may have, in order of discovery."""


def spread(
    ops: Sequence[Op],
    rules: Mapping[str, Rule | None],
    axis: AxisKind,
    *,
    taken: Taken,
    seeds: Mapping[str, Iterable[Shard]],
    natural: Callable[[Op], bool],
    barred: Callable[[str], bool] = lambda name: False,
    alias: Callable[[str], str] = lambda name: name,
) -> tuple[dict[str, tuple[Split, ...]], Shards]:
    """Splits per op name and shards per value.

    `natural`: which ops also start from their own whole factors. Values that are `barred` pass
    nothing on; `alias` maps values that must be placed alike to one name.
    """
    known = [(op, rule) for op in ops if (rule := rules[op.name])]
    slots = [_slots(op, rule, barred, alias) for op, rule in known]
    shards: Shards = {alias(name): dict.fromkeys(given) for name, given in seeds.items()}
    found: dict[str, dict[Split, None]] = {op.name: {} for op in ops}
    readers = _readers(slots)
    queue = deque(range(len(known)))
    seen = [[0] * len(places) for places in slots]
    for (op, rule), places in zip(known, slots, strict=True):
        for split in natural_splits(op, rule, axis, taken) if natural(op) else ():
            found[op.name][split] = None
            _pass_on(rule, places, split, axis, shards)
    while queue:
        at = queue.popleft()
        op, rule = known[at]
        fresh = [
            split
            for split in _reached(rule, slots[at], axis, shards, seen[at])
            if split not in found[op.name] and allowed(op, rule, split, axis, taken)
        ]
        for split in fresh:
            found[op.name][split] = None
            for name in _pass_on(rule, slots[at], split, axis, shards):
                queue.extend(i for i in readers[name] if i not in queue)
    return {name: tuple(sorted(splits)) for name, splits in found.items()}, shards


Slots = list[tuple[str, Dims]]
"""Values of an op, by their common name, with their factors."""


def _reached(
    rule: Rule, slots: Slots, axis: AxisKind, shards: Shards, seen: list[int]
) -> dict[Split, None]:
    """Splits of an op that the shards of its values lead to; of each value, after the first `seen`
    ones, which are counted on."""
    found: dict[Split, None] = {}
    for at, (name, dims) in enumerate(slots):
        known = shards.get(name, {})
        for shard in islice(known, seen[at], None):
            if split := split_of(rule, dims, shard, axis):
                found.update(dict.fromkeys(with_together(rule, split, axis)))
        seen[at] = len(known)
    return found


def _pass_on(rule: Rule, slots: Slots, split: Split, axis: AxisKind, shards: Shards) -> list[str]:
    """Values that may now be placed in a way that was not known before."""
    changed = []
    for name, dims in slots:
        shard = shard_of(rule, dims, split, axis)
        known = shards.setdefault(name, {})
        if shard and shard not in known:
            known[shard] = None
            changed.append(name)
    return changed


def _slots(op: Op, rule: Rule, barred: Callable[[str], bool], alias: Callable[[str], str]) -> Slots:
    pairs = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
    return [(alias(name), dims) for name, dims in pairs if name and not barred(name)]


def _readers(slots: Sequence[Slots]) -> dict[str, list[int]]:
    """Value -> places of the ops that read or make it."""
    found: dict[str, list[int]] = {}
    for i, places in enumerate(slots):
        for name in dict.fromkeys(name for name, _ in places):
            found.setdefault(name, []).append(i)
    return found
