"""A rank that is slower than others with the same work is named, and gets less to do."""

from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest

import meshwright as mw
from meshwright.ir.cluster.slower import slower
from meshwright.ir.plan.schedule import parse_action
from meshwright.running import slow_ranks
from meshwright.running.relief import Relief
from meshwright.running.replan import NewPlan, Replanner
from meshwright.running.slow_ranks import LOOKS, SlowRanks, times_as_long
from meshwright.runtime.record.record import Collected, Passed, Section, StepRecord
from meshwright.runtime.step.executor import RankProgress
from meshwright.runtime.world.standing import standing
from tests.planner.problems import cluster, mlp


@pytest.fixture(scope="module")
def plan():
    """Three replicas, of 3, 3 and 2 samples."""
    return mw.search(
        mlp(), cluster(3), constraints=("dp_shard=3",), progress=False, time_limit_s=600.0
    )  # it is ours, and a machine may stand still


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(slow_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def _standings(step, *busy_s):
    return {
        rank: standing(replace(RankProgress(step), busy_s=each)) for rank, each in enumerate(busy_s)
    }


def test_what_a_rank_waited_for_others_is_not_its_own():
    sections = [Section("schedule", 0.0, 9.0), Section(parse_action("0F0"), 1.0, 4.0),
                Section(parse_action("0B0"), 4.0, 9.0)]  # fmt: skip
    record = StepRecord(0.0, 0.0, "timed", sections=sections, waits=[Passed(1, None, 8, 1.0, 1.5)],
                        collectives=[Collected(2, None, 5.0, 6.0, 7.0)])  # fmt: skip
    assert record.busy_s == (3.0 - 0.5) + (5.0 - 1.0)


def test_it_is_measured_by_its_samples_and_its_peers(plan):
    assert [*plan.stages[0].batch_shares] == [3, 3, 2]
    assert times_as_long(plan, {0: 3.0, 1: 3.0, 2: 4.0}) == {0: 1.0, 1: 1.0, 2: 2.0}
    assert times_as_long(plan, {0: 1e-3, 1: 1e-3, 2: 4e-3}) == {}, "no more than overheads"
    alone = replace(plan.stages[0], devices=(0,), mesh={}, batch_shares=(8,))
    assert times_as_long(replace(plan, stages=(alone,)), {0: 9.0}) == {}


def test_looks_have_to_agree(plan, clock):
    looks = SlowRanks(plan)

    def look(step, *busy_s, known=MappingProxyType({})):
        clock[0] += slow_ranks.LOOK_S
        return looks.changed(lambda: _standings(step, *busy_s), known)

    assert looks.changed(None, {}) == {}, "not before it is time"
    for step in range(1, LOOKS):
        assert look(step, 3.0, 6.0, 2.0) == {}
    assert look(LOOKS - 1, 3.0, 6.0, 2.0) == {}, "no step was taken since"
    assert look(LOOKS, 3.0, 3.0, 2.0) == {}, "one of them was quick"
    for step in range(LOOKS + 1, 2 * LOOKS):
        assert look(step, 3.0, 6.6, 2.0) == {}
    assert look(20, 3.0, 6.6, 2.0) == {1: 2.25}
    found = [look(step, 3.0, 6.6, 2.0, known={1: 2.25}) for step in range(21, 30)]
    assert found == [{}] * 9, "that is known"
    found = [look(step, 3.0, 3.0, 2.0, known={1: 2.25}) for step in range(30, 40)]
    assert [one for one in found if one] == [{1: 1.0}]


def test_a_plan_that_knows_of_it_gives_it_less(plan, clock):
    machine = cluster(4)
    replanner = Replanner(plan, machine, target=None, _graph=mlp())
    said = []
    # Device 1 is lost: rank 1 is device 2.
    relief = Relief(replanner, NewPlan(plan), (1,), (0, 2, 3), lambda *what: said.append(what))
    for step in range(1, LOOKS + 1):
        clock[0] += slow_ranks.LOOK_S
        assert not relief.is_found(lambda step=step: _standings(step, 3.0, 24.0, 2.0))
    relief._search.join()
    assert said == [(1, 2, 8.0)] and replanner.slow == {2: 8.0}
    assert relief.is_found(lambda: {})
    shares = replanner.plan_without([1]).plan.stages[0].batch_shares
    assert shares[1] == min(shares) < 3 and sum(shares) == 8
    assert slower(machine, {}) is machine
    names = slower(machine, {2: 4.0}).device_names
    assert names == ("toy", "toy", "toy 4 times slower", "toy")
