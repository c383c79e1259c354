"""The contest of plans: who gets to the final, what is reported of runs that were made."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.accuracy.measure import paces_of_steps
from benchmarks.fastest.plans import Entrant, entrants, read, write
from benchmarks.fastest.report import Contest, report
from benchmarks.fastest.run import MOST, Ran, in_front, measured_s, next_up, noise, undecided
from benchmarks.fastest.run import read as read_runs
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.verify import verify
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.found import executed
from meshwright.running.disturbance import FixedWork, Mark, mark, others_share, pace_s
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from tests.traces import zoo_graph

RUNS = [
    Ran(0, 0, (1.05, 1.05)), Ran(1, 0, (1.0, 1.02)), Ran(2, 0, (1.5, 1.5)),
    Ran(0, 1, (1.0, 1.0)), Ran(1, 1, (1.1, 1.1)), Ran(0, 2, (1.02, 1.02)), Ran(1, 2, (1.1, 1.1)),
]  # fmt: skip


@pytest.fixture(scope="module")
def problem() -> Problem:
    case = CASES["gpt2"]
    graph = zoo_graph(case, 16)
    return make_problem(graph, Cluster.local(4), precision="fp32", optimizer="adamw")


@pytest.fixture(scope="module")
def found(problem: Problem) -> list[Entrant]:
    return entrants(problem)


def test_entrants_are_legal_and_distinct(problem: Problem, found: list[Entrant]) -> None:
    assert [e.origin for e in found].count("search") == 1 and found[0].origin == "search"
    assert {e.origin for e in found} == {"search", "finalist", "rival", "fixed"}
    assert len({e.name for e in found}) == len({executed(e.plan) for e in found}) == len(found)
    for entrant in found:
        assert verify(entrant.plan, problem.graph, problem.cluster) == ()
        assert entrant.predicted_s > 0


def test_entrants_come_back_from_files(found: list[Entrant], tmp_path: Path) -> None:
    write(tmp_path, found)
    assert [(e.origin, e.plan.hash) for e in read(tmp_path)] == [
        (e.origin, e.plan.hash) for e in found
    ]


def test_who_is_in_front(tmp_path: Path) -> None:
    assert in_front(RUNS) == [0, 1]
    # The kept plan is run again even if it was far behind.
    assert in_front([Ran(0, 0, (9.0,)), *RUNS[1:]]) == [0, 1]
    # What counts are final runs; of a plan that was left behind the heat.
    assert [measured_s(RUNS, n) for n in range(3)] == pytest.approx([1.01, 1.1, 1.5])
    assert noise(RUNS) == pytest.approx(0.01)
    path = tmp_path / "runs.json"
    assert read_runs(path) == []
    path.write_text(json.dumps([asdict(ran) for ran in RUNS]))
    assert read_runs(path) == RUNS


def test_the_report_tells_who_won(found: list[Entrant]) -> None:
    won = Contest("gpt2", 4, tuple(found), tuple(RUNS))
    assert won.ratio == 1.0 and won.numbers == [0, 1, 2]
    swapped = [Ran((1, 0, 2)[ran.number], ran.turn, ran.steps_s) for ran in RUNS]
    lost = Contest("vit", 4, tuple(found), tuple(swapped))
    assert lost.ratio == pytest.approx(1.1 / 1.01)
    unfinished = Contest("t5", 8, tuple(found), tuple(RUNS[:2]))
    # In the third contest the race has put another plan before that of the search.
    raced = Contest("t5", 4, (found[1], found[0], *found[2:]), tuple(RUNS))
    assert raced.ratio == 1.0 and raced.ratio_of(raced.searched) == pytest.approx(1.1 / 1.01)
    text = report([won, lost, raced, unfinished], "a command")
    assert "Within 5% of the fastest: 2 of 3 with a race" in text and "1 of 3 by search" in text
    assert "## vit on 4" in text and "## t5 on 8" not in text


def test_what_others_use_is_told_from_our_own() -> None:
    before = mark()
    while (after := mark()).own_s < before.own_s + 0.2:
        sum(range(10**6))
    assert 0.0 <= others_share(before, after) <= 1.0
    assert others_share(Mark(0, 0, 0), Mark(10, 9, 9)) == 0.0
    assert others_share(Mark(0, 0, 0), Mark(10, 9, 4)) > 0.0


def test_the_pace_of_the_machine_is_that_of_one_step():
    assert 1e-4 < pace_s() < 1.0


def finals(number: int, *seconds: float) -> list[Ran]:
    return [Ran(number, turn, (s, s)) for turn, s in enumerate(seconds, start=1)]


def test_a_rival_is_run_until_it_is_known_whether_the_chosen_plan_is_within_the_bar() -> None:
    chosen, wide = finals(0, 1.0, 1.01, 1.02), finals(1, 1.0, 1.1, 1.2)
    near, slower = finals(2, 1.0, 1.01, 1.02), finals(3, 1.5, 1.9, 1.7)
    faster, as_the_bar = finals(4, 0.9, 0.91, 0.92), finals(5, 0.96, 0.97, 0.98)
    assert undecided([*chosen, *near, *slower]) == []
    assert undecided([*finals(0, 0.9, 1.0, 1.1), *near, *slower]) == [0, 2]
    assert undecided([*chosen, *wide, *near, *slower]) == []  # it cannot be much faster
    assert undecided([*chosen, *as_the_bar, *near]) == [0, 5]
    assert undecided([*chosen, *as_the_bar, *faster]) == []  # lost already


def test_a_heat_that_was_off_hides_no_rival() -> None:
    """One run of the kept plan took half its usual time: it alone seems to be in front."""
    heat = [Ran(0, 0, (0.5,)), Ran(1, 0, (0.95,)), Ran(2, 0, (1.2,))]
    assert next_up(heat) == [0]
    assert next_up([*heat, *finals(0, 1.0)]) == [0, 1]
    assert next_up([*heat, *finals(0, 1.0, 1.01, 1.02), *finals(1, 0.97, 0.98)]) == [0, 1]
    # Three of each: what is left is to know whether the kept plan is within the bar.
    decided = [*heat, *finals(0, 1.0, 1.01, 1.02), *finals(1, 1.0, 1.01, 1.02)]
    assert next_up(decided) == []
    at_the_bar = [*heat, *finals(0, 1.0, 1.01, 1.02), *finals(1, 0.96, 0.97, 0.98)]
    assert next_up(at_the_bar) == [0, 1]
    assert next_up([*at_the_bar[:-3], *finals(1, *MOST // 3 * (0.96, 0.97, 0.98))]) == []


def test_steps_are_told_at_the_usual_pace() -> None:
    assert paces_of_steps([0.04, 0.06, 0.04, 0.04], 0.04) == pytest.approx([1.25, 1.25, 1.0])


def _glances() -> tuple[float, float]:
    work = FixedWork()
    return work.glance_s(), work.glance_s()


def test_all_ranks_see_one_pace() -> None:
    found = run_ranks(3, _glances)
    assert found[0] == found[1] == found[2]
    assert all(0 < seconds < 30 for seconds in found[0])
