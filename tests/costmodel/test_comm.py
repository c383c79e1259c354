"""Collective times against the textbook formulas, and what must hold whatever the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.comm import (
    Level,
    broadcast_time,
    collective_time,
    group_levels,
    primitive_time,
    send_time,
)
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import COMMUNICATES, Primitive
from meshwright.ir.device import Link

FAST = Link(name="fast", bandwidth_bytes_per_s=1e11, latency_s=1e-6, step_s=1e-6)
SLOW = Link(name="slow", bandwidth_bytes_per_s=1e9, latency_s=1e-5, step_s=1e-5)
WORDS = sorted(COMMUNICATES)


def test_ring_formulas() -> None:
    levels = (Level(4, SLOW),)
    n = 1e9
    assert collective_time(Primitive.ALL_REDUCE, n, levels) == pytest.approx(1.5 + 6e-5)
    assert collective_time(Primitive.ALL_GATHER, n, levels) == pytest.approx(0.75 + 3e-5)
    assert collective_time(Primitive.REDUCE_SCATTER, n, levels) == pytest.approx(0.75 + 3e-5)
    assert collective_time(Primitive.ALL_TO_ALL, n, levels) == pytest.approx(0.1875 + 3e-5)


def test_small_messages_go_by_a_tree() -> None:
    assert collective_time(Primitive.ALL_REDUCE, 8, (Level(64, SLOW),)) == pytest.approx(
        2 * 6 * 1e-5, rel=1e-3
    )


def test_the_outer_tier_carries_less() -> None:
    both = collective_time(Primitive.ALL_REDUCE, 1e9, (Level(8, FAST), Level(2, SLOW)))
    assert both == pytest.approx(2 * (15 / 16) / 8, rel=1e-2)
    assert both < collective_time(Primitive.ALL_REDUCE, 1e9, (Level(16, SLOW),))


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
    assert primitive_time(Primitive.ALL_REDUCE, 1e6, [3], cluster) == 0.0
    inside = primitive_time(Primitive.ALL_REDUCE, 1e8, range(8), cluster)
    assert inside < primitive_time(Primitive.ALL_REDUCE, 1e8, range(0, 32, 4), cluster)


def test_published_all_reduce_of_8_a100() -> None:
    """nccl-tests on 8 A100: 512 MiB in 4.2 ms, 512 B in 23 us (aiconfigurator tables)."""
    levels = group_levels(range(8), Cluster.preset("a100-80"))
    assert collective_time(Primitive.ALL_REDUCE, 2**29, levels) == pytest.approx(4.2e-3, rel=0.5)
    assert collective_time(Primitive.ALL_REDUCE, 512, levels) == pytest.approx(23e-6, rel=0.5)


@given(
    st.sampled_from(WORDS),
    st.floats(0, 1e12),
    st.floats(1, 10),
    st.integers(2, 64),
    st.integers(1, 8),
)
def test_monotone(word: Primitive, nbytes: float, factor: float, size: int, outer: int) -> None:
    levels = (Level(size, FAST),) + ((Level(outer, SLOW),) if outer > 1 else ())
    seconds = collective_time(word, nbytes, levels)
    assert 0 < seconds <= collective_time(word, nbytes * factor, levels)
    slower = tuple(Level(level.size, SLOW) for level in levels)
    assert seconds <= collective_time(word, nbytes, slower) * (1 + 1e-9)


@given(st.floats(0, 1e12), st.integers(2, 64))
def test_an_all_reduce_is_its_two_halves(nbytes: float, size: int) -> None:
    levels = (Level(size, SLOW),)
    halves = collective_time(Primitive.REDUCE_SCATTER, nbytes, levels) + collective_time(
        Primitive.ALL_GATHER, nbytes, levels
    )
    assert collective_time(Primitive.ALL_REDUCE, nbytes, levels) == pytest.approx(halves)


def test_local_primitives_are_free() -> None:
    for word in set(Primitive) - COMMUNICATES:
        assert collective_time(word, 1e9, (Level(4, SLOW),)) == 0.0


def test_messages_and_broadcast() -> None:
    assert send_time(1e9, SLOW) == pytest.approx(1 + 1e-5)
    assert broadcast_time(1e9, (Level(4, SLOW),)) == pytest.approx(1 + 2e-5)
    assert broadcast_time(1e9, ()) == 0.0
