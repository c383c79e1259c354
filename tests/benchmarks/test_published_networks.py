"""Networks between nodes, as published tests of their collectives have them."""

from statistics import median

import pytest

from benchmarks.fit.fit_comm import CommTiming, outer_timings
from benchmarks.fit.link_tables import continued, p5_series
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import LINKS


def test_aws_p5_is_priced_as_nccl_tests_measured_it():
    found = {s.nodes: s for s in p5_series()}
    assert sorted(found) == [2, 4, 8, 16, 32]
    errors = []
    for nodes, series in found.items():
        levels = (Level(8, LINKS["nvlink4"]), Level(nodes, LINKS["efa-p5"]))
        for row in series.rows:
            seconds = collective_time(Primitive(row.operation), row.nbytes, levels)
            errors.append(abs(seconds / row.seconds - 1))
    # A step of the all-reduces over 4 nodes between 1 and 2 GiB is passed over.
    assert median(errors) < 0.01 and max(errors) < 0.16
    row = next(r for r in found[2].rows if r.operation == "all_to_all" and r.nbytes == 16 * 2**25)
    assert row.seconds == pytest.approx(2**25 * 15 / 16 / 44.79e9)


def test_twice_the_nodes_are_continued_from_two_series():
    half, last = (s for s in p5_series() if s.nodes in (16, 32))
    found = continued(half, last)
    assert found.nodes == 64 and found.inside == 8
    for operation, more in (("all_gather", 2), ("all_reduce", 1)):
        a, b, c = (
            next(r.seconds for r in s.rows if (r.operation, r.nbytes) == (operation, 2**25))
            for s in (half, last, found)
        )
        assert c == pytest.approx(b + more * (b - a))


def test_all_to_alls_between_nodes_are_taken_apart_as_they_are_put_together():
    inner, outer = Level(8, LINKS["nvlink4"]), Level(4, LINKS["efa-p5"])
    timings = [
        (n, collective_time(Primitive.ALL_TO_ALL, n, (inner, outer))) for n in (2.0**30, 2.0**36)
    ]
    (_, low), (_, high) = outer_timings(timings, inner, outer, "all_to_all")
    assert high - low == pytest.approx(8 * (timings[1][1] - timings[0][1]))
    assert CommTiming("all_to_all", 1.0, 32, low).seconds > 0
