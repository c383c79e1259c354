"""Collective times against textbook formulas and curves, and what holds whatever the numbers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.comm.comm import (
    Level,
    bends,
    broadcast_time,
    collective_band,
    collective_time,
    group_levels,
    send_time,
)
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import LINK_BAND, Curve, Link
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive
from meshwright.ir.presets import LINKS, network

FAST = Link(name="fast", bandwidth_bytes_per_s=1e11, latency_s=1e-6, step_s=1e-6)
SLOW = Link(name="slow", bandwidth_bytes_per_s=1e9, latency_s=1e-5, step_s=1e-5)
CURVED = Link(
    name="curved",
    bandwidth_bytes_per_s=1e9,
    latency_s=1e-5,
    step_s=1e-5,
    curves=(
        Curve(operation="all_reduce", size=2, points=((1024.0, 1e-4), (1e6, 1e-3), (1e7, 2e-2))),
        Curve(operation="all_reduce", size=8, points=((1024.0, 2e-4), (1e6, 3e-3), (1e7, 4e-2))),
        Curve(operation="send", size=2, points=((0.0, 2e-5), (1e6, 2e-3))),
    ),
)
WORDS = sorted(COMMUNICATES)
LINK = st.sampled_from([FAST, SLOW, CURVED, *LINKS.values()])


def all_reduce(nbytes: float, *levels: Level) -> float:
    return collective_time(Primitive.ALL_REDUCE, nbytes, levels)


def test_ring_formulas() -> None:
    levels = (Level(4, SLOW),)
    n = 1e9
    assert collective_time(Primitive.ALL_REDUCE, n, levels) == pytest.approx(1.5 + 6e-5)
    assert collective_time(Primitive.ALL_GATHER, n, levels) == pytest.approx(0.75 + 3e-5)
    assert collective_time(Primitive.REDUCE_SCATTER, n, levels) == pytest.approx(0.75 + 3e-5)
    assert collective_time(Primitive.ALL_TO_ALL, n, levels) == pytest.approx(0.1875 + 3e-5)


def test_in_a_mesh_few_devices_reach_a_part_of_the_whole_rate() -> None:
    """MI300X: 48 GB/s between any two, 7 times that for all eight."""
    nbytes, mesh = 2.0**33, LINKS["xgmi-mi300x"]
    for size in (2, 4, 8):
        levels = (Level(size, mesh),)
        wire_s = nbytes / size / 48e9
        assert collective_time(Primitive.ALL_GATHER, nbytes, levels) == pytest.approx(wire_s, 1e-2)
        assert collective_time(Primitive.REDUCE_SCATTER, nbytes, levels) == pytest.approx(
            wire_s, 1e-2
        )
        assert all_reduce(nbytes, *levels) == pytest.approx(2 * wire_s, 1e-2)
        assert collective_time(Primitive.ALL_TO_ALL, nbytes, levels) == pytest.approx(
            wire_s / size, 1e-2
        )
    assert send_time(nbytes, mesh) == pytest.approx(nbytes / 48e9, 1e-2)


def test_small_messages_go_by_a_tree() -> None:
    assert all_reduce(8, Level(64, SLOW)) == pytest.approx(2 * 6 * 1e-5, rel=1e-3)


def test_a_curve_is_exact_where_it_was_measured() -> None:
    for known in CURVED.curves[:2]:
        for nbytes, seconds in known.points:
            assert all_reduce(nbytes, Level(known.size, CURVED)) == pytest.approx(seconds)
    assert send_time(1e6, CURVED) == pytest.approx(2e-3)
    # Flat below the first point, at the last rate beyond the last.
    assert all_reduce(0, Level(2, CURVED)) == pytest.approx(1e-4)
    assert all_reduce(2e7, Level(2, CURVED)) == pytest.approx(2e-2 + 1e7 * 1.9e-2 / 9e6)


def test_between_and_beyond_measured_sizes() -> None:
    half_way = all_reduce(1e6, Level(4, CURVED))
    assert half_way == pytest.approx((1e-3 + 3e-3) / 2)
    beyond = all_reduce(1e7, Level(16, CURVED))
    moved = (15 / 16) / (7 / 8)
    assert beyond == pytest.approx(2e-4 + 2 * 1e-5 + moved * (4e-2 - 2e-4))


def test_other_operations_stand_in() -> None:
    halves = [
        collective_time(word, 1e7, (Level(2, CURVED),))
        for word in (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER)
    ]
    assert halves == pytest.approx([1e-4 + (2e-2 - 1e-4) / 2] * 2)
    assert collective_time(Primitive.ALL_TO_ALL, 1e9, (Level(2, CURVED),)) == pytest.approx(
        0.25, rel=1e-3
    )


def test_tiers_form_one_ring() -> None:
    """Latencies add up; the slowest tier sets the pace, with a port of its own per device."""
    both = all_reduce(1e9, Level(8, FAST), Level(2, SLOW))
    assert both == pytest.approx(2 * (15 / 16) / 8, rel=1e-2)
    assert both < all_reduce(1e9, Level(16, SLOW))
    assert all_reduce(8, Level(8, FAST), Level(2, SLOW)) == pytest.approx(
        2 * 3 * 1e-6 + 2 * 1e-5, rel=1e-3
    )
    # Where the node is the bottleneck the network costs only latency.
    inside = all_reduce(1e9, Level(8, SLOW), Level(2, FAST))
    assert inside == pytest.approx(2 * 15 / 16, rel=1e-2)


def test_levels_of_groups() -> None:
    cluster = Cluster.preset("a100-80", num_nodes=4, devices_per_node=8)
    sizes = {
        (0,): [],
        (0, 1): [2],
        (0, 8, 16, 24): [4],
        tuple(range(16)): [8, 2],
        (0, 1, 2, 8): [3, 2],
    }
    for ranks, expected in sizes.items():
        assert [level.size for level in group_levels(ranks, cluster)] == expected
    assert collective_time(Primitive.ALL_REDUCE, 1e6, group_levels([3], cluster)) == 0.0
    inside = collective_time(Primitive.ALL_REDUCE, 1e8, group_levels(range(8), cluster))
    assert inside < collective_time(
        Primitive.ALL_REDUCE, 1e8, group_levels(range(0, 32, 4), cluster)
    )


def test_sister_groups_share_a_port() -> None:
    """Eight devices behind one port: a group that has it to itself is up to 8 times as fast."""
    cluster = Cluster.preset("v100-16", num_nodes=2, network="ethernet-25g")
    group = (0, 8)

    def seconds(groups_at_once: int | None) -> float:
        levels = group_levels(group, cluster, groups_at_once=groups_at_once)
        return collective_time(Primitive.ALL_REDUCE, 1e9, levels)

    port = network("ethernet-25g", 8)
    assert port.shared_by == 8
    assert port.bandwidth_bytes_per_s * 8 == pytest.approx(3.125e9)
    assert seconds(None) == seconds(8) == pytest.approx(1e9 / port.rate, rel=1e-2)
    assert seconds(1) == pytest.approx(seconds(8) / 8, rel=1e-2)
    assert seconds(2) == pytest.approx(seconds(8) / 4, rel=1e-2)
    # A group of all devices has the whole port, divided among its members.
    whole = collective_time(Primitive.ALL_REDUCE, 1e9, group_levels(range(16), cluster))
    assert whole == pytest.approx(2 * (15 / 16) * 1e9 / (3.125e9 * port.efficiency), rel=1e-2)


def test_ports_of_their_own_are_not_shared() -> None:
    cluster = Cluster.preset("h100-sxm", num_nodes=2)
    alone = group_levels((0, 8), cluster, groups_at_once=1)
    assert alone == group_levels((0, 8), cluster)


def test_published_all_reduces() -> None:
    """nccl-tests on 8 A100: 512 MiB in 4.2 ms, 512 B in 23 us (aiconfigurator tables)."""
    levels = group_levels(range(8), Cluster.preset("a100-80"))
    assert all_reduce(2**29, *levels) == pytest.approx(4.2e-3, rel=0.02)
    assert all_reduce(512, *levels) == pytest.approx(22.6e-6, rel=0.05)


@given(st.sampled_from(WORDS), st.floats(0, 1e12), st.floats(1, 10), LINK, LINK,
       st.integers(2, 64), st.integers(1, 64))  # fmt: skip
def test_never_falls_with_bytes(
    word: Primitive, nbytes: float, factor: float, near: Link, far: Link, size: int, outer: int
) -> None:
    levels = (Level(size, near),) + ((Level(outer, far),) if outer > 1 else ())
    seconds = collective_time(word, nbytes, levels)
    assert 0 < seconds <= collective_time(word, nbytes * factor, levels) * (1 + 1e-9)
    assert 0 < broadcast_time(nbytes, levels)
    assert 0 < send_time(nbytes, far) <= send_time(nbytes * factor, far)


@given(st.sampled_from(WORDS[:1]), st.floats(0, 1e12), st.integers(2, 63), st.integers(1, 8))
def test_never_falls_with_the_group(word: Primitive, nbytes: float, size: int, outer: int) -> None:
    more = (Level(outer, SLOW),) if outer > 1 else ()
    seconds = collective_time(word, nbytes, (Level(size, FAST), *more))
    if not more:
        assert seconds <= collective_time(word, nbytes, (Level(size + 1, FAST),)) * (1 + 1e-9)
    slower = tuple(Level(level.size, SLOW) for level in (Level(size, FAST), *more))
    assert seconds <= collective_time(word, nbytes, slower) * (1 + 1e-9)


@given(st.floats(0, 1e12), st.integers(2, 64))
def test_an_all_reduce_is_its_two_halves(nbytes: float, size: int) -> None:
    levels = (Level(size, SLOW),)
    halves = collective_time(Primitive.REDUCE_SCATTER, nbytes, levels) + collective_time(
        Primitive.ALL_GATHER, nbytes, levels
    )
    assert collective_time(Primitive.ALL_REDUCE, nbytes, levels) == pytest.approx(halves)


@given(st.sampled_from(WORDS), LINK, st.integers(2, 16), st.floats(0, 1))
def test_linear_between_bends(word: Primitive, link: Link, size: int, where: float) -> None:
    levels = (Level(size, link),)
    for low, high in zip(bends(word, levels), bends(word, levels)[1:], strict=False):
        between = collective_time(word, low + where * (high - low), levels)
        ends = [collective_time(word, n, levels) for n in (low, high)]
        assert between == pytest.approx(ends[0] + where * (ends[1] - ends[0]))


def test_local_primitives_are_free() -> None:
    for word in set(Primitive) - COMMUNICATES:
        assert collective_time(word, 1e9, (Level(4, SLOW),)) == 0.0


def test_messages_and_broadcast() -> None:
    assert send_time(1e9, SLOW) == pytest.approx(1 + 1e-5)
    assert broadcast_time(1e9, (Level(4, SLOW),)) == pytest.approx(1 + 2e-5)
    assert broadcast_time(1e9, ()) == 0.0


def test_bands() -> None:
    assert collective_band((), 1e6) == 0.0
    assert collective_band((Level(2, SLOW),), 1e6) == LINK_BAND["assumption"]
    sure = Link(name="sure", bandwidth_bytes_per_s=1e9, latency_s=0.0, curves=CURVED.curves,
                fit_error=0.04, source="measured")  # fmt: skip
    assert collective_band((Level(2, sure),), 1e6) == 0.04
    assert collective_band((Level(2, sure), Level(2, SLOW)), 1e6) == LINK_BAND["assumption"]
    assert collective_band((Level(2, sure),), 1e9) > 0.04


def test_curves_survive_a_file(tmp_path: Path) -> None:
    preset = Cluster.preset("h100-sxm", num_nodes=2, network="efa-p5")
    node = Node(devices=("h100-sxm",), link=CURVED)
    mixed = Cluster(name="x", device_types=preset.device_types, nodes=(node,))
    for cluster in (preset, mixed):
        assert cluster.nodes[0].link.curves
        cluster.save(tmp_path / "cluster.yaml")
        again = Cluster.load(tmp_path / "cluster.yaml")
        assert again == cluster
        assert again.fingerprint == cluster.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operation": "reduce"}, "the operations are all_reduce"),
        ({"size": 1}, "2 devices or more"),
        ({"points": ()}, "at least one point"),
        ({"points": ((0.0, 1.0), (10.0, 0.5))}, "must not fall"),
        ({"points": ((10.0, 1.0), (10.0, 1.5))}, "must ascend"),
        ({"points": ((-5.0, 1.0),)}, "must ascend"),
        ({"points": ((0.0, float("nan")),)}, "must not fall"),
    ],
)
def test_curves_that_cannot_be(changes: dict[str, object], words: str) -> None:
    values: dict[str, object] = {"operation": "send", "size": 2, "points": ((0.0, 1e-5),)}
    with pytest.raises(PlanError, match=words):
        Curve(**(values | changes))  # type: ignore[arg-type]


def test_curves_in_a_file_of_people(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "name: lab\n"
        "links:\n"
        "  lan:\n"
        "    bandwidth_bytes_per_s: 10Gb/s\n"
        "    latency_s: 40us\n"
        "    shared_by: 4\n"
        "    curves:\n"
        "      - {operation: all_reduce, size: 2, points: [[1024, 1.0e-4], [1000000, 2e-3]]}\n"
        "nodes: [{count: 2, devices: {l4: 1}, link: pcie4}]\n"
        "between_nodes: lan\n"
    )
    cluster = Cluster.load(path)
    assert collective_time(
        Primitive.ALL_REDUCE, 1e6, group_levels((0, 1), cluster)
    ) == pytest.approx(2e-3)
    path.write_text(path.read_text().replace("all_reduce", "reduce"))
    with pytest.raises(PlanError, match="the operations are all_reduce"):
        Cluster.load(path)
