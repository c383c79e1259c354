"""Which splits of each op are worth considering: those that a neighbour's split leads to.

A linear layer could split its columns in any sections; that three equal sections make sense it
learns from the `split` behind it. So placements spread along the values of a run of ops, from op to
op through their factors, until nothing new appears.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.ir.graph import Op
from meshwright.ir.layout import Shard
from meshwright.planner.factors import (
    AxisKind,
    Split,
    Taken,
    allowed,
    natural_splits,
    shard_of,
    split_of,
)
from meshwright.planner.rules import Dims, Rule

Shards = dict[str, dict[Shard, None]]
"""Value -> placements it may have, in order of discovery."""


def spread(
    ops: Sequence[Op],
    rules: Mapping[str, Rule | None],
    axis: AxisKind,
    *,
    taken: Taken,
    seeds: Mapping[str, Iterable[Shard]],
    natural: bool,
    barred: Callable[[str], bool] = lambda name: False,
    alias: Callable[[str], str] = lambda name: name,
) -> tuple[dict[str, tuple[Split, ...]], Shards]:
    """Splits per op name and shards per value.

    `natural`: each op also starts from its own whole factors. Values that are `barred` pass nothing
    on; `alias` maps values that must be placed alike to one name.
    """
    shards: Shards = {alias(name): dict.fromkeys(given) for name, given in seeds.items()}
    splits: dict[str, dict[Split, None]] = {op.name: {} for op in ops}
    readers = _readers(ops, rules, barred, alias)
    queue = deque(range(len(ops)))
    waiting = set(queue)

    def add(op: Op, rule: Rule, split: Split) -> None:
        if split in splits[op.name] or not allowed(op, rule, split, axis, taken):
            return
        splits[op.name][split] = None
        for name, dims in _slots(op, rule, barred):
            shard = shard_of(rule, dims, split, axis)
            known = shards.setdefault(alias(name), {})
            if shard and shard not in known:
                known[shard] = None
                for i in readers.get(alias(name), ()):
                    if i not in waiting:
                        waiting.add(i)
                        queue.append(i)

    if natural:
        for op in ops:
            if rule := rules[op.name]:
                for split in natural_splits(op, rule, axis, taken):
                    add(op, rule, split)
    while queue:
        at = queue.popleft()
        waiting.discard(at)
        op, rule = ops[at], rules[ops[at].name]
        if rule is None:
            continue
        for name, dims in _slots(op, rule, barred):
            for shard in tuple(shards.get(alias(name), ())):
                if found := split_of(rule, dims, shard, axis):
                    add(op, rule, found)
    return {name: tuple(sorted(found)) for name, found in splits.items()}, shards


def _slots(op: Op, rule: Rule, barred: Callable[[str], bool]) -> list[tuple[str, Dims]]:
    pairs = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
    return [(name, dims) for name, dims in pairs if name and not barred(name)]


def _readers(
    ops: Sequence[Op],
    rules: Mapping[str, Rule | None],
    barred: Callable[[str], bool],
    alias: Callable[[str], str],
) -> dict[str, list[int]]:
    """Value -> positions of the ops that read or make it."""
    found: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        if rule := rules[op.name]:
            for name in dict.fromkeys(alias(n) for n, _ in _slots(op, rule, barred)):
                found.setdefault(name, []).append(i)
    return found
