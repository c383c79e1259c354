"""Links whose curves go through what a profile measured."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import exp, log
from statistics import median
from typing import Any

from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.costmodel.comm.curves import curve
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import Curve, Link
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.profile.profile import CollectiveRecord, GroupShape, Profile

_LEAST_BAND = 0.05
_LARGE_BYTES = 2**18
"""Overlap is judged by collectives of at least this size: small ones are over too soon."""

_FURTHER_BYTES = 2**24
"""Beyond the only size that was measured, where a curve is continued."""


def fit_links(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with links that give back the measured times of collectives and messages.

    A tier that no record is about stays as it is.
    """
    known = _as_crowded(cluster, profile.collectives)
    inside = [r for r in known if r.group.per_node == r.group.size]
    across = [r for r in known if r.group.per_node == 1 < r.group.size]
    both = [r for r in known if 1 < r.group.per_node < r.group.size]
    nodes = tuple(_node(node, inside, across) for node in cluster.nodes)
    between = cluster.between_nodes
    if between is not None and across:
        between = _widened(fit_link(between, across), nodes[0].link, both)
    return replace(cluster, nodes=nodes, between_nodes=between)


def _as_crowded(cluster: Cluster, records: Sequence[CollectiveRecord]) -> list[CollectiveRecord]:
    """Those of groups that it has room for, measured while about as many were at it as fit: a
    profile may hold those of larger and of smaller clusters of the same machines."""
    held: dict[tuple[GroupShape, str, bool], dict[int, list[CollectiveRecord]]] = {}
    for r in records:
        if r.group.size > cluster.num_devices:
            continue
        kinds = held.setdefault((r.group, r.operation, r.loaded), {})
        kinds.setdefault(r.groups_at_once, []).append(r)
    found = []
    for (group, _, _), kinds in held.items():
        room = cluster.num_devices // group.size
        found += kinds[min(kinds, key=lambda n: (abs(log(n / room)), n))]
    return found


def _node(
    node: Node, inside: Sequence[CollectiveRecord], across: Sequence[CollectiveRecord]
) -> Node:
    if inside:
        node = replace(node, link=fit_link(node.link, inside))
    if across and node.uplink is not None:
        node = replace(node, uplink=fit_link(node.uplink, across))
    return node


def fit_link(link: Link, records: Sequence[CollectiveRecord]) -> Link:
    """The link with curves through the records of groups that it alone connects."""
    idle = [r for r in records if not r.loaded]
    curves = tuple(_continued(link, known) for known in measured_curves(idle))
    if not curves:
        return link
    fitted = replace(
        link,
        curves=curves,
        fit_error=max(_LEAST_BAND, median(r.time.spread for r in idle)),
        source="measured",
        reference=f"{len(idle)} timings of collectives, groups of {_sizes(curves)}",
        **_constants(link, curves),
    )
    return replace(fitted, **_overlap(fitted, [r for r in records if r.loaded]))


def _continued(link: Link, known: Curve) -> Curve:
    """Of one size alone nothing is learnt about larger ones: there the link's rate is as it was."""
    if len(known.points) > 1:
        return known
    ((nbytes, seconds),) = known.points
    before = curve(link, known.operation, known.size)
    more = before(nbytes + _FURTHER_BYTES) - before(nbytes)
    return replace(known, points=((nbytes, seconds), (nbytes + _FURTHER_BYTES, seconds + more)))


def _sizes(curves: Iterable[Curve]) -> str:
    return ", ".join(map(str, sorted({c.size for c in curves})))


def measured_curves(records: Iterable[CollectiveRecord]) -> tuple[Curve, ...]:
    """One curve per operation and group size, through what each size is expected to take."""
    seen: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        seen[r.operation, r.group.size][float(r.nbytes)].append(r.time.expected_s)
    return tuple(
        Curve(
            operation=operation,
            size=size,
            points=rising([(n, median(times)) for n, times in sorted(by_bytes.items())]),
        )
        for (operation, size), by_bytes in sorted(seen.items())
    )


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The nearest never-falling seconds, by ratio (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for _, seconds in points:
        pools.append((log(max(seconds, 1e-9)), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools[-2:]
            pools[-2:] = [((low * few + high * many) / (few + many), few + many)]
    means = [(exp(mean), count == 1) for mean, count in pools for _ in range(count)]
    # What was in order stays exactly as measured; `max` is against rounding alone.
    found = (s if alone else mean for (_, s), (mean, alone) in zip(points, means, strict=True))
    return tuple(zip((n for n, _ in points), accumulate(found, max), strict=True))


def _constants(link: Link, curves: Sequence[Curve]) -> dict[str, Any]:
    """Alpha-beta constants that agree with the curves, for what they say nothing about."""
    found: dict[str, Any] = {}
    sends = [c for c in curves if c.operation == "send"]
    sums = sorted((c for c in curves if c.operation == "all_reduce"), key=lambda c: c.size)
    bandwidth = max((_rate(c, 1.0) for c in sends), default=0.0)
    if sums:
        widest = sums[-1]
        rate = _rate(widest, 2 * (widest.size - 1) / widest.size)
        bandwidth = max(bandwidth, rate)
        found["efficiency"] = max(1e-3, rate / bandwidth)
        found |= _latencies(sums)
    if bandwidth:
        found["bandwidth_bytes_per_s"] = bandwidth
    if sends:
        found["latency_s"] = sends[0].points[0][1]
    return found


def _rate(known: Curve, moved: float) -> float:
    """Bytes per second at the largest size, latency left out."""
    (first_n, first_s), (last_n, last_s) = known.points[0], known.points[-1]
    if first_n == last_n:
        return moved * last_n / last_s
    return moved * (last_n - first_n) / max(last_s - first_s, last_s / 2)


def _latencies(sums: Sequence[Curve]) -> dict[str, Any]:
    """Launch and step from all-reduces of few bytes: each ring step more costs a step more."""
    slopes = [
        (b.points[0][1] - a.points[0][1]) / (2 * (b.size - a.size)) for a, b in pairwise(sums)
    ]
    first = sums[0].points[0][1]
    step = max(0.0, median(slopes)) if slopes else first / (2 * sums[0].size)
    return {"step_s": step, "launch_s": max(0.0, first - 2 * (sums[0].size - 1) * step)}


def _overlap(link: Link, loaded: Sequence[CollectiveRecord]) -> dict[str, Any]:
    """How much collectives and computation slow each other down, by the bytes of messages; in the
    largest groups that were measured, as plans overlap gradients among many ranks."""
    large = [r for r in loaded if r.nbytes >= _LARGE_BYTES]
    widest = max((r.group.size for r in large), default=0)
    by_bytes: dict[int, list[CollectiveRecord]] = defaultdict(list)
    for r in large:
        if r.group.size == widest:
            by_bytes[r.nbytes].append(r)
    points = tuple(
        (float(nbytes), *_slowdowns(link, records)) for nbytes, records in sorted(by_bytes.items())
    )
    if not points:
        return {}
    _, compute, comm = points[-1]
    return {
        "overlap_compute_slowdown": compute, "overlap_comm_slowdown": comm, "beside": points,
    }  # fmt: skip


def _slowdowns(link: Link, records: Sequence[CollectiveRecord]) -> tuple[float, float]:
    """Of computing and of collectives, the middle of all operations."""
    ratios = [r.time.expected_s / curve(link, r.operation, r.group.size)(r.nbytes) for r in records]
    return _slowdown(median(r.compute_slowdown for r in records)), _slowdown(median(ratios))


def _slowdown(ratio: float) -> float:
    """Nothing gets quicker by company; beyond 100 a busy machine was measured, not the overlap."""
    return min(max(1.0, ratio), 100.0)


def _widened(link: Link, inside: Link, both: Sequence[CollectiveRecord]) -> Link:
    """The band at least as wide as the error on groups over both tiers, which are put together."""
    errors = []
    for r in both:
        if r.loaded or r.operation not in set(Primitive):
            continue
        nodes = -(-r.group.size // r.group.per_node)
        levels = (Level(r.group.per_node, inside), Level(nodes, link))
        predicted = collective_time(Primitive(r.operation), r.nbytes, levels)
        errors.append(abs(predicted / r.time.expected_s - 1))
    if not errors:
        return link
    return replace(link, fit_error=min(10.0, max(link.band, median(errors))))
