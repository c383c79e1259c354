"""Links from measured records: exact at what was measured, one tier each, honest about the rest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.comm.comm import collective_band, collective_time, group_levels, send_time
from meshwright.costmodel.comm.curves import curve
from meshwright.costmodel.fit.calibrate_links import fit_link, fit_links, rising
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.profile.profile import CollectiveRecord, GroupShape, Machine, Profile, Timing

MACHINE = Machine(device="test", kind="cpu", driver="1", torch="2", backend="gloo", cores=2)
SIZES = (2**10, 2**14, 2**18, 2**22)
TRUE = {"all_reduce": (2e-4, 1e-9), "send": (5e-5, 4e-10), "all_gather": (1e-4, 9e-10)}


def record(
    operation: str,
    nbytes: int,
    seconds: float,
    *,
    size: int = 2,
    per_node: int | None = None,
    spread: float = 0.02,
    loaded: bool = False,
    compute_slowdown: float = 1.0,
) -> CollectiveRecord:
    return CollectiveRecord(
        operation=operation,
        nbytes=nbytes,
        group=GroupShape(size=size, per_node=per_node or size),
        groups_at_once=1,
        time=Timing(median_s=seconds, spread=spread, count=9),
        loaded=loaded,
        compute_slowdown=compute_slowdown,
    )


def straight(
    size: int, *, per_node: int | None = None, factor: float = 1.0
) -> list[CollectiveRecord]:
    return [
        record(op, n, factor * (alpha * size + beta * n), size=size, per_node=per_node)
        for op, (alpha, beta) in TRUE.items()
        if op != "send" or size == 2
        for n in SIZES
    ]


def profile(*records: CollectiveRecord) -> Profile:
    return Profile(machine=MACHINE, collectives=records)


def test_one_size_says_nothing_about_larger_ones() -> None:
    """A short profile may have the latency alone: large messages stay as dear as they were."""
    link = Cluster.local(2).nodes[0].link
    fitted = fit_link(link, [record("all_reduce", 2**10, 3e-3), record("send", 2**10, 1e-3)])
    for name in ("all_reduce", "send"):
        before, after = curve(link, name, 2), curve(fitted, name, 2)
        assert after(2**10) == (3e-3 if name == "all_reduce" else 1e-3)
        for nbytes in (2**20, 2**24, 2**28):
            more = before(nbytes) - before(2**10)
            assert after(nbytes) - after(2**10) == pytest.approx(more)


def test_measured_times_come_back() -> None:
    records = [*straight(2), *straight(4)]
    cluster = fit_links(Cluster.local(4), profile(*records))
    link = cluster.nodes[0].link
    assert link.source == "measured"
    for r in records:
        levels = group_levels(range(r.group.size), cluster)
        if r.operation == "send":
            assert send_time(r.nbytes, link) == pytest.approx(r.time.median_s)
        else:
            seconds = collective_time(Primitive(r.operation), r.nbytes, levels)
            assert seconds == pytest.approx(r.time.median_s)
    # Between and beyond the sizes, and for a group size that was not measured.
    for nbytes in (2**20, 2**26):
        seconds = collective_time(Primitive.ALL_REDUCE, nbytes, group_levels(range(4), cluster))
        assert seconds == pytest.approx(8e-4 + 1e-9 * nbytes, rel=0.01)
    three = collective_time(Primitive.ALL_REDUCE, 2**20, group_levels(range(3), cluster))
    assert 4e-4 < three - 1e-9 * 2**20 < 8e-4


def test_bands_follow_the_spread_and_the_reach() -> None:
    quiet, noisy = (
        fit_links(
            Cluster.local(2),
            profile(*(replace(r, time=replace(r.time, spread=spread)) for r in straight(2))),
        )
        for spread in (0.01, 0.3)
    )
    inside = [collective_band(group_levels((0, 1), c), 2**20) for c in (quiet, noisy)]
    assert inside == [0.05, 0.3]
    assert collective_band(group_levels((0, 1), quiet), 2**30) > inside[0]


def test_tiers_are_fitted_apart() -> None:
    cluster = Cluster.preset("a100-80", num_nodes=2, devices_per_node=4)
    across = straight(2, per_node=1, factor=10.0)
    fitted = fit_links(cluster, profile(*straight(2), *straight(4), *across))
    near = collective_time(Primitive.ALL_REDUCE, 2**22, group_levels((0, 1), fitted))
    far = collective_time(Primitive.ALL_REDUCE, 2**22, group_levels((0, 4), fitted))
    assert far == pytest.approx(10 * near)
    assert fitted.between_nodes is not None and fitted.between_nodes.source == "measured"
    # Groups over both tiers are put together from the two; how well is part of the band.
    both = [record("all_reduce", n, 1.0, size=8, per_node=4) for n in SIZES]
    wide = fit_links(cluster, profile(*straight(4), *across, *both))
    assert wide.between_nodes is not None
    assert wide.between_nodes.band > fitted.between_nodes.band


def test_records_of_larger_and_smaller_clusters_do_not_mix() -> None:
    """Pairs alone, and two pairs at once that take three times as long, in one profile."""
    alone = straight(2)
    crowded = [replace(r, groups_at_once=2) for r in straight(2, factor=3.0)]
    times = {
        world: collective_time(
            Primitive.ALL_REDUCE, 2**22,
            group_levels((0, 1), fit_links(Cluster.local(world), profile(*alone, *crowded))),
        )
        for world in (2, 4, 8)
    }  # fmt: skip
    assert times[4] == pytest.approx(3 * times[2])
    assert times[8] == times[4]  # the nearest that there is


def test_a_tier_without_records_stays() -> None:
    cluster = Cluster.preset("a100-80", num_nodes=2)
    assert fit_links(cluster, profile()) == cluster
    fitted = fit_links(cluster, profile(*straight(2)))
    assert fitted.between_nodes == cluster.between_nodes
    assert fitted.nodes[0].link != cluster.nodes[0].link


def test_overlap() -> None:
    loaded = [
        record("all_reduce", 2**22, 3 * (4e-4 + 1e-9 * 2**22), loaded=True, compute_slowdown=1.4),
        # Small ones are over too soon to tell.
        record("all_reduce", 2**10, 1.0, loaded=True, compute_slowdown=50.0),
    ]
    link = fit_link(Cluster.local(2).nodes[0].link, [*straight(2), *loaded])
    assert link.overlap_comm_slowdown == pytest.approx(3.0)
    assert link.overlap_compute_slowdown == pytest.approx(1.4)
    faster = [record("all_reduce", 2**22, 1e-6, loaded=True, compute_slowdown=0.9)]
    link = fit_link(Cluster.local(2).nodes[0].link, [*straight(2), *faster])
    assert (link.overlap_comm_slowdown, link.overlap_compute_slowdown) == (1.0, 1.0)


def test_overlap_is_that_of_long_messages_among_many() -> None:
    slowdowns = {(4, 2**20): 1.2, (4, 2**24): 1.7, (2, 2**20): 1.1, (2, 2**26): 1.3}
    loaded = [
        record("all_reduce", nbytes, 1.0, size=size, loaded=True, compute_slowdown=slow)
        for (size, nbytes), slow in slowdowns.items()
    ]
    link = fit_link(Cluster.local(4).nodes[0].link, [*straight(2), *straight(4), *loaded])
    assert link.overlap_compute_slowdown == pytest.approx(1.7)


def test_calibrated_clusters_have_another_fingerprint() -> None:
    cluster = Cluster.local(2)
    once, again = (fit_links(cluster, profile(*straight(2, factor=f))) for f in (1.0, 1.1))
    assert len({cluster.fingerprint, once.fingerprint, again.fingerprint}) == 3


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12))
def test_rising_is_monotone_and_keeps_what_rises(seconds: list[float]) -> None:
    points = [(float(2**i), s) for i, s in enumerate(seconds)]
    found = rising(points)
    assert [n for n, _ in found] == [n for n, _ in points]
    times = [s for _, s in found]
    assert times == sorted(times)
    assert min(seconds) * (1 - 1e-9) <= times[0] and times[-1] <= max(seconds) * (1 + 1e-9)
    assert rising(found) == found
    if seconds == sorted(seconds):
        assert times == pytest.approx(seconds)
