"""Strategies on several axes where an op brings parts together inside."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import Placement, Shard

Side = tuple[Placement, ...]
"""Placements of an op's inputs and outputs on one axis."""


def brought_once(
    rule: Rule, picks: NDArray[np.int64], sides: Sequence[Sequence[Side]]
) -> NDArray[np.bool_]:
    """Which combinations (rows of one choice per axis) split factors together on one axis at most,
    or on several if they nest, and split them on no other axis."""
    kept = np.ones(len(picks), np.bool_)
    for name, (lead, *others) in rule.together.items():
        leads = _counts(rule, [lead], sides)
        follows = _counts(rule, others, sides)
        both = [a & b for a, b in zip(leads, follows, strict=True)]
        used = _total(both, picks) > 0
        once = _total(follows, picks) == (_total(both, picks) if name in rule.nested else 1)
        if lead not in rule.loose:
            once &= _total(leads, picks) == 1
        kept &= once | ~used
    return kept


def _counts(
    rule: Rule, factors: Sequence[str], sides: Sequence[Sequence[Side]]
) -> list[NDArray[np.int64]]:
    """Per axis and choice, 1 if it splits one of the factors."""
    places = [
        (tensor, dim)
        for tensor, dims in enumerate((*rule.inputs, *rule.outputs))
        for dim, held in enumerate(dims)
        if set(held) & set(factors)
    ]

    def splits(side: Side) -> bool:
        return any(isinstance(p := side[t], Shard) and p.dim == dim for t, dim in places)

    return [np.array([splits(side) for side in own], np.int64) for own in sides]


def _total(counts: Sequence[NDArray[np.int64]], picks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per combination, on how many axes."""
    found = np.zeros(len(picks), np.int64)
    for axis, own in enumerate(counts):
        found += own[picks[:, axis]]
    return found
