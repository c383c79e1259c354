"""Goodput: what is simulated is what the formula says, and every second is somewhere."""

from dataclasses import fields, replace
from random import Random

import pytest

from meshwright.costmodel.goodput import FaultyCluster, NodesPlan, _FaultyRun, goodput
from meshwright.ir.errors import PlanError
from meshwright.ir.faults.mix import LLAMA_3

DAY_S = 86_400.0
AT = FaultyCluster(
    mix=LLAMA_3, nodes=2048, devices_per_node=8, held_s=5.0, write_s=60.0, back_s=300.0,
    repair_s=0.0,
)  # fmt: skip
WHOLE, PART = NodesPlan(2048, 10.0), NodesPlan(1920, 11.0)


def _run(at, *plans, days=540.0):
    found = goodput(at, plans, WHOLE.step_s, seconds=days * DAY_S)
    shares = [getattr(found, f.name) for f in fields(found) if f.name != "failures"]
    assert sum(shares) == pytest.approx(1.0, abs=1e-9) and min(shares) >= 0
    return found


def test_without_repairs_it_is_the_formula():
    found, cost = _run(AT, WHOLE, days=5400.0), AT.cost(2048)
    assert 1 - found.goodput == pytest.approx(cost.lost(cost.interval_s), rel=0.03)
    assert found.failures == pytest.approx(419 * 100, rel=0.03)
    assert found.slower == found.waiting == 0


def test_ways_to_go_on():
    """Who waits for a node loses what its repair takes; who shrinks is slower so long; a plan that
    leaves nodes over never waits."""
    slow = replace(AT, repair_s=7200.0)
    waits, shrinks, spares = _run(slow, WHOLE), _run(slow, WHOLE, PART), _run(slow, PART)
    assert waits.waiting > 0.3 and shrinks.waiting == spares.waiting == 0
    assert waits.goodput < spares.goodput < shrinks.goodput < _run(AT, WHOLE).goodput
    assert spares.slower == pytest.approx((1 - 10 / 11) * (spares.goodput / (10 / 11)), rel=1e-9)
    assert 0 < shrinks.slower < spares.slower
    assert _run(slow, WHOLE) == waits, "the same seed gives the same run"


def test_a_job_grows_once_there_are_nodes_enough_and_it_has_saved():
    run = _FaultyRun(AT, (WHOLE, PART), WHOLE.step_s, Random(0))
    run.up, run.repairs = 2046, [20.0, 50.0]
    run._train(PART, DAY_S)
    assert run.failures == 0 and run.now_s == 50.0 + AT.held_s + AT.write_s + AT.back_s
    assert run.spent["saving"] > AT.held_s + AT.write_s and run.spent["back"] == AT.back_s
    run._mend()
    assert run.up == 2048 and run._plan() == WHOLE


def test_plans_that_nothing_can_run_are_refused():
    with pytest.raises(PlanError, match="2048 nodes or fewer"):
        goodput(AT, [NodesPlan(2049, 1.0)], 1.0, seconds=1.0)
    with pytest.raises(PlanError, match="above 0"):
        goodput(AT, [NodesPlan(1, 0.0)], 1.0, seconds=1.0)
    with pytest.raises(PlanError, match="no interval"):
        goodput(replace(AT, held_s=0.0, write_s=0.0), [WHOLE], 1.0, seconds=1.0)
