"""Time of collectives and messages: a curve per tier and operation, put together over tiers.

NCCL runs a group over several tiers as one pipelined ring or tree: latencies add up, and the
slowest tier sets the pace. An outer tier carries 1/inner of the bytes per device, as each of the
`inner` devices of a node has its share of the node's ports.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from meshwright.costmodel.comm.curves import Bent, curve
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import Curve, Link
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive


@dataclass(frozen=True, slots=True)
class Level:
    """One tier of a group: `size` members, each a group of the tier below, over `link`."""

    size: int
    link: Link
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Costs are looked up by tiers very often.
        object.__setattr__(self, "_hash", hash((self.size, self.link)))

    def __hash__(self) -> int:
        return self._hash


Levels = tuple[Level, ...]
"""Innermost first; levels of size 1 are left out, so a group of one has none."""


def ranks_of(levels: Levels) -> int:
    """How many there are on all of them; 1 on none."""
    return prod([level.size for level in levels])


def group_levels(
    ranks: Sequence[int], cluster: Cluster, *, groups_at_once: int | None = None
) -> Levels:
    """The tiers of a group of ranks.

    Uneven nodes: as many ranks as on the fullest node inside, and the slowest link of each tier.
    `groups_at_once`: groups like this one that work at the same time on each node. Unless it is
    given, all devices of a node are taken to use its ports at once, as in tensor and data
    parallelism over a whole cluster.
    """
    per_node = Counter(map(cluster.node_of, ranks))
    levels = []
    inside = max(per_node.values())
    if inside > 1:
        links = [cluster.nodes[n].link for n, count in per_node.items() if count > 1]
        levels.append(Level(inside, _slowest(links)))
    users = inside * groups_at_once if groups_at_once else None
    per_rack: dict[int, list[int]] = {}
    for node in per_node:
        per_rack.setdefault(cluster.nodes[node].rack, []).append(node)
    if (widest := max(map(len, per_rack.values()))) > 1:
        links = [
            cluster.link_of_nodes(nodes[0], n) for nodes in per_rack.values() for n in nodes[1:]
        ]
        levels.append(Level(widest, used_by(_slowest(links), users)))
    if len(per_rack) > 1:
        heads = [nodes[0] for nodes in per_rack.values()]
        links = [cluster.link_of_nodes(heads[0], head) for head in heads[1:]]
        levels.append(Level(len(per_rack), used_by(_slowest(links), users)))
    return tuple(levels)


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.rate)


@lru_cache(maxsize=1024)
def used_by(link: Link, users: int | None) -> Link:
    """Returns the link as each of `users` devices of a node sees it, where its port is shared."""
    more = 1.0 if users is None else max(1.0, link.shared_by / users)
    return link if more == 1.0 else sped(link, more)


def sped(link: Link, factor: float) -> Link:
    """The link with so many times the bandwidth, and its latencies as they are."""
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        curves=tuple(_sped(c, factor) for c in link.curves),
    )


def _sped(known: Curve, factor: float) -> Curve:
    first = known.points[0][1]
    return replace(known, points=tuple((n, first + (s - first) / factor) for n, s in known.points))


def collective_time(primitive: Primitive, nbytes: float, levels: Levels) -> float:
    """Seconds of one collective; `nbytes` is the whole value, as if replicated on the group."""
    if not levels or primitive not in COMMUNICATES:
        return 0.0
    return _time(primitive.value, nbytes, levels)


def broadcast_time(nbytes: float, levels: Levels) -> float:
    """Seconds of a pipelined tree broadcast: every byte crosses the slowest tier once."""
    return _time("broadcast", nbytes, levels) if levels else 0.0


def send_time(nbytes: float, link: Link) -> float:
    """Seconds of one point-to-point message."""
    return curve(link, "send", 2)(nbytes)


def bends(primitive: Primitive, levels: Levels) -> tuple[float, ...]:
    """Bytes at which the time of a collective bends; it is linear between, or close to it."""
    _, tiers = _over_tiers(primitive.value, levels)
    found = {nbytes / held for bent, _, held in tiers for nbytes in bent.nbytes}
    return tuple(sorted(found))


def collective_band(levels: Levels, nbytes: float) -> float:
    """Relative error to expect of a collective; wider beyond what was measured."""
    return max((_band(level.link, nbytes) for level in levels), default=0.0)


@lru_cache(maxsize=1024)
def _reach(link: Link) -> float:
    """Bytes up to which the link's curves have points."""
    return max((c.points[-1][0] for c in link.curves), default=float("inf"))


def _band(link: Link, nbytes: float) -> float:
    return link.band * (1.0 if nbytes <= _reach(link) else 1.5)


def _time(operation: str, nbytes: float, levels: Levels) -> float:
    if len(levels) == 1:
        return curve(levels[0].link, operation, levels[0].size)(nbytes)
    latency_s, tiers = _over_tiers(operation, levels)
    return latency_s + max(
        (bent(nbytes * held) - bent.latency_s) * factor for bent, factor, held in tiers
    )


_Tier = tuple[Bent, float, float]
"""Its curve, a factor on its transfer time, and the share of the bytes that a device handles."""


@lru_cache(maxsize=4096)
def _over_tiers(operation: str, levels: Levels) -> tuple[float, tuple[_Tier, ...]]:
    """(latency of all tiers, each tier)."""
    total = prod(level.size for level in levels)
    tiers: list[_Tier] = []
    launches = []
    inner = 1
    for level in levels:
        bent = curve(level.link, operation, level.size)
        launches.append(min(level.link.launch_s, bent.latency_s))
        if operation == "all_to_all":
            # Each device sends 1/total of its 1/total to every other one on this tier.
            tiers.append((bent, inner * level.size**2 / total**2, 1.0))
        elif operation == "broadcast":
            tiers.append((bent, 1.0, 1.0 / inner))
        else:
            # A ring over all devices passes (total-1)/total of its bytes over every edge.
            factor = (total - 1) / total * level.size / (level.size - 1)
            tiers.append((bent, factor, 1.0 / inner))
        inner *= level.size
    # The tiers are one collective: it is launched once.
    latency = sum(bent.latency_s for bent, _, _ in tiers) - sum(launches) + max(launches)
    return latency, tuple(tiers)
