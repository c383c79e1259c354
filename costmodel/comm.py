"""Time of collectives and messages: alpha-beta per tier, hierarchical over tiers.

A collective over n ranks with `nbytes` (the whole value, as if replicated) moves (n-1)/n of it in
n-1 ring steps (all-gather, reduce-scatter), twice that for an all-reduce (Patarasuk & Yuan 2009).
Over several tiers the inner tier reduces first, so that the outer one carries 1/inner of the bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import COMMUNICATES, Primitive
from meshwright.ir.device import Link


@dataclass(frozen=True, slots=True)
class Level:
    """One tier of a group: `size` members, each a group of the tier below, over `link`."""

    size: int
    link: Link


Levels = tuple[Level, ...]
"""Innermost first; levels of size 1 are left out, so a group of one has none."""

_ROUNDS = {
    Primitive.ALL_REDUCE: 2,
    Primitive.ALL_GATHER: 1,
    Primitive.REDUCE_SCATTER: 1,
}


def group_levels(ranks: Sequence[int], cluster: Cluster) -> Levels:
    """The tiers of a group of ranks.

    Uneven nodes: as many ranks as on the fullest node inside, and the slowest link of each tier.
    """
    per_node = Counter(map(cluster.node_of, ranks))
    levels = []
    inside = max(per_node.values())
    if inside > 1:
        links = [cluster.nodes[n].link for n, count in per_node.items() if count > 1]
        levels.append(Level(inside, _slowest(links)))
    per_rack: dict[int, list[int]] = {}
    for node in per_node:
        per_rack.setdefault(cluster.nodes[node].rack, []).append(node)
    if (widest := max(map(len, per_rack.values()))) > 1:
        links = [
            cluster.link_of_nodes(nodes[0], n) for nodes in per_rack.values() for n in nodes[1:]
        ]
        levels.append(Level(widest, _slowest(links)))
    if len(per_rack) > 1:
        heads = [nodes[0] for nodes in per_rack.values()]
        links = [cluster.link_of_nodes(heads[0], head) for head in heads[1:]]
        levels.append(Level(len(per_rack), _slowest(links)))
    return tuple(levels)


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.rate)


def collective_time(primitive: Primitive, nbytes: float, levels: Levels) -> float:
    """Seconds of one collective; `nbytes` is the whole value, as if replicated on the group."""
    if not levels or primitive not in COMMUNICATES:
        return 0.0
    if primitive is Primitive.ALL_TO_ALL:
        return _all_to_all(nbytes, levels)
    rounds = _ROUNDS[primitive]
    ring = _launch(levels)
    tree = ring
    inner = 1
    for level in levels:
        # Each member of the level holds 1/inner of the value by now.
        moved = _passes(primitive, level.link) * nbytes / inner
        ring += rounds * (level.size - 1) * level.link.step_s
        ring += moved * (level.size - 1) / level.size / level.link.rate
        tree += rounds * ceil(log2(level.size)) * level.link.step_s + moved / level.link.rate
        inner *= level.size
    return min(ring, tree)


def _passes(primitive: Primitive, link: Link) -> float:
    """How often the data goes round the ring of a tier."""
    match primitive:
        case Primitive.ALL_GATHER:
            return link.all_gather_passes
        case Primitive.REDUCE_SCATTER:
            return link.reduce_scatter_passes
        case _:
            return _ROUNDS[primitive]


def _launch(levels: Levels) -> float:
    return max(level.link.launch_s for level in levels)


def _all_to_all(nbytes: float, levels: Levels) -> float:
    """Each rank holds nbytes/n and sends 1/n of that to each other rank, over the tier between."""
    total = 1
    for level in levels:
        total *= level.size
    seconds = _launch(levels)
    inner = 1
    for level in levels:
        peers = inner * (level.size - 1)
        seconds += peers * (level.link.step_s + nbytes / total / total / level.link.rate)
        inner *= level.size
    return seconds


def broadcast_time(nbytes: float, levels: Levels) -> float:
    """Seconds of a pipelined tree broadcast: every byte crosses the slowest tier once."""
    if not levels:
        return 0.0
    steps = sum(ceil(log2(level.size)) * level.link.step_s for level in levels)
    return _launch(levels) + steps + nbytes / min(level.link.rate for level in levels)


def send_time(nbytes: float, link: Link) -> float:
    """Seconds of one point-to-point message."""
    return link.latency_s + nbytes / link.bandwidth_bytes_per_s


def primitive_time(
    primitive: Primitive, nbytes: float, ranks: Sequence[int], cluster: Cluster
) -> float:
    """Seconds that a primitive of `ir.conversions` communicates on a group of ranks."""
    return collective_time(primitive, nbytes, group_levels(ranks, cluster))
