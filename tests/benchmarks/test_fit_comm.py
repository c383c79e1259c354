"""Fits to published-like timings: better than constants on sizes that the fit has not seen."""

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit.fit_comm import (
    CommTiming,
    errors,
    fit_curves,
    fit_points,
    halves,
    outer_timings,
)
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.ir.cluster.device import Curve, Link
from meshwright.ir.layout.conversions import Primitive

LINK = Link(
    name="x", bandwidth_bytes_per_s=3e11, latency_s=8e-6, efficiency=0.5, launch_s=1e-5,
    step_s=1e-6, source="fitted",
)  # fmt: skip


def nccl_like(nbytes: float, size: int) -> float:
    """The quickest of three protocols: quick to start and slow, up to the other way round."""
    ways = ((8e-6, 2e10), (1.5e-5, 9e10), (4e-5, 2.2e11))
    moved = 2 * (size - 1) / size * nbytes
    return min(start + 2 * size * 4e-7 + moved / rate for start, rate in ways)


def rows(noise: float) -> list[CommTiming]:
    random = Random(1)
    return [
        CommTiming(
            "all_reduce",
            n,
            size,
            nccl_like(n, size) * random.uniform(1 - noise, 1 + noise),
        )
        for size in (2, 4, 8)
        for n in (2.0**k for k in range(9, 30))
    ]


def test_better_than_constants_on_sizes_not_seen() -> None:
    first, second = halves(rows(noise=0.03))
    assert {r.nbytes for r in first}.isdisjoint(r.nbytes for r in second)
    fitted = Link(name="y", bandwidth_bytes_per_s=3e11, latency_s=8e-6, curves=fit_curves(first))
    mine, theirs = (median(map(abs, errors(link, second))) for link in (fitted, LINK))
    assert mine < 0.06
    assert mine < theirs / 3


def test_few_points_do() -> None:
    timings = [(2.0**k, nccl_like(2.0**k, 8)) for k in range(9, 30)]
    points = fit_points(timings)
    assert 3 <= len(points) <= 8
    true = dict(timings)
    assert all(seconds == pytest.approx(true[nbytes]) for nbytes, seconds in points)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-6, 1e2)), min_size=1, max_size=15))
def test_any_timings_make_a_legal_curve(timings: list[tuple[int, float]]) -> None:
    points = fit_points([(2.0**k, s) for k, s in timings])
    Curve(operation="all_reduce", size=2, points=points)  # it checks itself
    assert points[0][0] == 2.0 ** min(k for k, _ in timings)
    assert points[-1][0] == 2.0 ** max(k for k, _ in timings)


def test_the_outer_tier_is_found_behind_the_inner() -> None:
    """Timings made by the composition of tiers give the outer curve back."""
    inner = Link(name="in", bandwidth_bytes_per_s=3e11, latency_s=0.0, launch_s=1e-5, step_s=1e-6)
    true = Curve(operation="all_reduce", size=4, points=((0.0, 5e-5), (1e6, 1e-3), (1e8, 2e-2)))
    outer = Link(name="out", bandwidth_bytes_per_s=1e10, latency_s=0.0, curves=(true,))
    levels = (Level(8, inner), Level(4, outer))
    sizes = [0.0, 8e5, 8e6, 8e7, 8e8]
    timings = [(n, collective_time(Primitive.ALL_REDUCE, n, levels)) for n in sizes]
    points = tuple(outer_timings(timings, *levels, "all_reduce"))
    again = Link(
        name="again", bandwidth_bytes_per_s=1e10, latency_s=0.0,
        curves=(Curve(operation="all_reduce", size=4, points=points),),
    )  # fmt: skip
    for nbytes, seconds in timings:
        found = collective_time(Primitive.ALL_REDUCE, nbytes, (Level(8, inner), Level(4, again)))
        assert found == pytest.approx(seconds, rel=0.02)
