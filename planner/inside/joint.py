"""Strategies on several axes at once: every combination of one per axis whose splits nest."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import Placement, Shard, Strategy, units_of
from meshwright.planner.inside.together import brought_once

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Picks = Ints
"""Combination x axis: which of the axis's own choices it takes."""
Sizes = tuple[int, ...]
"""Ranks of each axis."""
OwnSplits = frozenset[tuple[int, int, bool]]
"""Dim, `outer` and `zigzag` of splits that a value may have on an axis alone."""


def combine(counts: Sequence[int], together: Callable[[int, int], Bools]) -> Picks:
    """All combinations of `counts[a]` choices; `together(a, b)` says which pairs of them agree."""
    picks = np.zeros((1, 0), np.int64)
    for axis, count in enumerate(counts):
        column = np.tile(np.arange(count, dtype=np.int64), len(picks))
        picks = np.concatenate([np.repeat(picks, count, 0), column[:, None]], 1)
        alive = np.ones(len(picks), np.bool_)
        for before in range(axis):
            alive &= together(before, axis)[picks[:, before], picks[:, axis]]
        picks = picks[alive]
    return picks


def joint_strategies(
    op: Op,
    rule: Rule | None,
    graph: Graph,
    sizes: Sizes,
    found: Sequence[Sequence[Strategy]],
    own: Sequence[OwnSplits],
) -> Picks:
    """Which strategies, of those `found` for each axis, the op may have together.

    `own`: per tensor.
    """
    names = (*op.inputs, *op.outputs)
    sides = [[(*s.inputs, *s.outputs) for s in each] for each in found]

    def together(a: int, b: int) -> Bools:
        agree = np.ones((len(found[a]), len(found[b])), np.bool_)
        for i, name in enumerate(names):
            if name:
                first, second = [s[i] for s in sides[a]], [s[i] for s in sides[b]]
                shape = graph.tensors[name].shape
                agree &= nesting(shape, first, sizes[a], second, sizes[b])
        return agree

    picks = combine([len(each) for each in found], together)
    for i, name in enumerate(names):
        if name and len(sizes) > 1:
            placed = [[side[i] for side in each] for each in sides]
            picks = picks[_reached(picks, placed, sizes, own[i])]
    for i, dim in _plain_dims(rule):
        outers = [[_outer(side[i], dim) for side in each] for each in sides]
        picks = picks[_in_one_run(picks, outers, sizes)]
    if rule and rule.together:
        picks = picks[brought_once(rule, picks, sides)]
    if rule and rule.free and len(sizes) > 1:
        picks = picks[_cut_once(picks, sides)]
    return picks


def joint_placements(
    graph: Graph, name: str, sizes: Sizes, found: Sequence[Sequence[Placement]], own: OwnSplits
) -> Picks:
    """Which placements, of those `found` for each axis, a value may have together."""
    shape = graph.tensors[name].shape

    def together(a: int, b: int) -> Bools:
        return nesting(shape, found[a], sizes[a], found[b], sizes[b])

    picks = combine([len(each) for each in found], together)
    return picks[_reached(picks, found, sizes, own)] if len(sizes) > 1 else picks


def _reached(
    picks: Picks, placed: Sequence[Sequence[Placement]], sizes: Sizes, own: OwnSplits
) -> Bools:
    """Whether each axis splits as it may alone, or goes on inside the parts of another one.

    A split inside of parts that no axis makes would only leave each rank with strips.
    """
    shards = [[p if isinstance(p, Shard) else None for p in each] for each in placed]
    dims = [np.array([s.dim if s else -1 - a for s in each]) for a, each in enumerate(shards)]
    outers = [np.array([s.outer if s else 0 for s in each]) for each in shards]
    kept = np.ones(len(picks), np.bool_)
    for a, each in enumerate(shards):
        alone = np.array([s is None or (s.dim, s.outer, s.zigzag) in own for s in each], np.bool_)
        mine = picks[:, a]
        fits = alone[mine]
        for b, size in enumerate(sizes):
            if b != a:
                other = picks[:, b]
                goes_on = outers[b][other] * size == outers[a][mine]
                fits |= goes_on & (dims[a][mine] == dims[b][other])
        kept &= fits
    return kept


def nesting(
    shape: tuple[int, ...], first: Sequence[Placement], m: int, second: Sequence[Placement], n: int
) -> Bools:
    """Which placements on an axis of `m` ranks go with which on another one of `n`."""
    known: dict[tuple[Placement, Placement], bool] = {}
    for p, q in product(dict.fromkeys(first), dict.fromkeys(second)):
        both = isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim
        known[p, q] = not both or _nests(shape, p, m, q, n)
    return np.array([[known[p, q] for q in second] for p in first], np.bool_)


def _nests(shape: tuple[int, ...], p: Placement, m: int, q: Placement, n: int) -> bool:
    assert isinstance(p, Shard) and isinstance(q, Shard)
    size = shape[p.dim]
    return _inside(size, p, m, q) or _inside(size, q, n, p)


def _inside(size: int, outside: Shard, ranks: int, inside: Shard) -> bool:
    """Whether one goes on in each part of the other."""
    sections, rest = divmod(inside.outer, outside.outer * ranks)
    if rest or units_of(size, outside) % ranks:
        return False
    return not (inside.zigzag and sections % 2)


def _plain_dims(rule: Rule | None) -> list[tuple[int, int]]:
    """Tensors and their dims of which a rank can only have consecutive elements."""
    if rule is None:
        return []
    return [
        (i, dim)
        for i, dims in enumerate((*rule.inputs, *rule.outputs))
        for dim, factors in enumerate(dims)
        if rule.plain & set(factors)
    ]


def _outer(placement: Placement, dim: int) -> int:
    """0 where the dim is not split."""
    return placement.outer if isinstance(placement, Shard) and placement.dim == dim else 0


def _in_one_run(picks: Picks, outers: Sequence[Sequence[int]], sizes: Sizes) -> Bools:
    """Each axis goes on exactly where the one outside of it cuts."""
    kept = np.ones(len(picks), np.bool_)
    for row, pick in enumerate(picks):
        cuts = sorted((outers[a][i], sizes[a]) for a, i in enumerate(pick) if outers[a][i])
        expected = 1
        for outer, size in cuts:
            kept[row] &= outer == expected
            expected *= size
    return kept


def _cut_once(picks: Picks, sides: Sequence[Sequence[tuple[Placement, ...]]]) -> Bools:
    """Inputs that generated code cuts itself are cut along one axis only."""
    splits = [
        np.array([any(isinstance(p, Shard) for p in s) for s in own], np.int64) for own in sides
    ]
    count = sum(split[picks[:, axis]] for axis, split in enumerate(splits))
    return np.asarray(count <= 1, np.bool_)
