"""A choice made better one node at a time, with the others as they are."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inside.choices import ValueEdge
from meshwright.planner.inside.eliminate import Reduced

Ints = NDArray[np.int64]
PASSES = 20
"""At most; most choices stand still after two or three."""


def polish(reduced: Reduced, states: Mapping[int, int]) -> dict[int, int]:
    """As good as changes of single nodes make it."""
    found, near = dict(states), _links_of(reduced)
    for _ in range(PASSES):
        before = dict(found)
        for node in sorted(found):
            total = _costs(reduced, near[node], node, found)
            best = int(np.argmin(total))
            if total[best] < total[found[node]]:
                found[node] = best
        if found == before:
            break
    return found


def _links_of(reduced: Reduced) -> dict[int, list[ValueEdge]]:
    near: dict[int, list[ValueEdge]] = {n: [] for n in reduced.costs}
    for link in reduced.links:
        for node in dict.fromkeys((link.source, *(r.node for r in link.readers))):
            near[node].append(link)
    return near


def _costs(reduced: Reduced, near: list[ValueEdge], node: int, states: Mapping[int, int]) -> Ints:
    """Of each state of a node, with what its neighbours are in."""
    total = reduced.costs[node].copy()
    for other, table in reduced.edges[node].items():
        total += table[:, states[other]]
    for link in near:
        total += _made(link, states) if link.source == node else _read(link, node, states)
    return total


def _made(link: ValueEdge, states: Mapping[int, int]) -> Ints:
    """Per state of the source."""
    wanted = sorted({int(r.wants[states[r.node]]) for r in link.readers})
    return np.asarray(link.price[link.made][:, wanted].sum(1))


def _read(link: ValueEdge, node: int, states: Mapping[int, int]) -> Ints:
    """Per state of a reader: what is not wanted by others, or twice by itself."""
    row = link.price[link.made[states[link.source]]].copy()
    row[[int(r.wants[states[r.node]]) for r in link.readers if r.node != node]] = 0
    own = [r.wants for r in link.readers if r.node == node]
    total = row[own[0]]
    for i, wants in enumerate(own[1:], 1):
        again = np.any([wants == before for before in own[:i]], axis=0)
        total = total + np.where(again, 0, row[wants])
    return np.asarray(total)
