"""New plans for what is left: parts that divide first, the fastest taken, each searched once."""

import threading
import time
from dataclasses import replace

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.deadline import check_time
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.routing import spread_evenly
from meshwright.running import replan
from meshwright.running.replan import Replanner
from tests.tools.report.plans import piped

PLAN = replace(piped(4, 8, 34, 32), global_batch_size=256, routing=(spread_evenly(8, 2),))
WHOLE = Cluster.preset("h100-sxm", num_nodes=64, devices_per_node=8)
LEFT = 504
NODE = range(504, 512)
WAIT_S = 60.0


@pytest.fixture
def searched(monkeypatch):
    """(devices, pins) of each search; a plan takes a second for each device beside 448."""
    asked = []

    def search(graph, left, options, **_):
        assert options.routes == PLAN.routing
        asked.append((left.num_devices, tuple(options.constraints)))
        time.sleep(0.02)
        if left.num_devices < 400:
            raise Infeasible("too small")
        found = replace(PLAN.predicted, step_s=1.0 + abs(left.num_devices - 448))
        return replace(PLAN, predicted=found)

    monkeypatch.setattr(replan, "search", search)
    return asked


def _replanner():
    return Replanner(PLAN, WHOLE, target=None, _graph=object())


def _join(replanner):
    for one in replanner._beside:
        one.thread.join()


def test_the_fastest_is_taken_and_the_rest_rests(searched):
    found = _replanner().plan_without(NODE)
    devices = list(dict.fromkeys(each for each, _ in searched))  # what is infeasible twice
    assert len(devices) == 3 and devices[-1] == LEFT and max(devices[:2]) < LEFT
    fastest = min(devices, key=lambda each: abs(each - 448))
    assert found.plan.predicted.step_s == 1.0 + abs(fastest - 448)
    assert len(found.resting) == LEFT - fastest > 0
    assert all(pins and pins[0].startswith("pp=") for _, pins in searched[:2])
    assert searched[-1][1] == PLAN.constraints


def test_what_divides_is_searched_before_time_is_up(searched):
    """All that is left comes last, and not where there is a plan and it might take too long."""
    _replanner().plan_without(NODE, limit_s=0.02)
    ((devices, pins),) = searched
    assert devices < LEFT and pins


def test_a_node_less_is_searched_ahead(searched):
    """Whichever it will be."""
    replanner = _replanner()
    replanner.search_ahead([])
    _join(replanner)
    count = len(searched)
    assert count > 0 and replanner.plan_without(range(8)).resting
    assert len(searched) == count
    replanner.plan_without([3])
    assert len(searched) > count


def test_what_is_searched_ahead_gives_way(monkeypatch):
    """To what ranks wait for, and to the end of the job; what it looks for itself is waited for."""
    began, begun, done = threading.Event(), [], []

    def search(graph, left, options, **_):
        beside = threading.current_thread() is not threading.main_thread()
        begun.append((left.num_devices, beside))
        began.set()
        until = time.monotonic() + asks_s * beside
        while time.monotonic() < until:  # as the phases of a search, which ask all the time
            check_time()
            time.sleep(0.001)
        if beside:
            go.wait(WAIT_S)
        done.append((left.num_devices, beside))
        return PLAN

    def ahead():
        began.clear()
        begun.clear()
        done.clear()
        replanner.search_ahead([])
        began.wait()

    monkeypatch.setattr(replan, "search", search)
    monkeypatch.setattr(replan, "smaller_uses", lambda *_, **__: ())
    replanner, go, asks_s = _replanner(), threading.Event(), 0.0
    ahead()
    assert replanner.plan_without([]).plan is PLAN
    assert not done, "it is known: nobody waits for the search that is under way"
    go.set()
    _join(replanner)
    replanner, asks_s = _replanner(), WAIT_S
    ahead()
    replanner.plan_without([3])
    _join(replanner)
    assert done == [(511, False)], "what was stopped has found nothing"
    ahead()
    replanner.beside([3, 9], lambda: replanner.plan_without([3, 9]))  # waits for its turn
    replanner.close()
    assert begun == [(LEFT, True)] and not done
    asks_s = 0.3
    ahead()
    replanner.plan_without(NODE)
    assert begun == done == [(LEFT, True)], "it was searched once"
