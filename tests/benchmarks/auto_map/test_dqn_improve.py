"""Small steps of the DQN searcher, and results that outlive a run that was cut off."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.auto_map.rows import Rows
from meshwright.planner.problem.candidates import Choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.searchers.dqn.drafts import Draft, Sketches
from meshwright.planner.searchers.dqn.explore import Explorer
from meshwright.planner.searchers.dqn.improve import Improver, family, starts
from meshwright.planner.searchers.dqn.judge import Judge
from tests.planner.problems import TINY, cluster, mlp, problem


def plain() -> Problem:
    return problem(mlp(4), cluster(4))


def stepped(asked: Problem, count: int) -> tuple[Judge, Improver, float]:
    """From one stage with so many micro-batches: the first step's time, and where steps led."""
    judge, sketches = Judge(asked), Sketches(asked)
    start = sketches.choice(Draft(count, 0, stopped=True, recompute=1.0))
    assert start
    first = judge(start)
    improver = Improver(judge, sketches, lambda _: False, timed=True)
    list(improver.climb(start, first))
    assert judge.best
    return judge, improver, first.value


def test_steps_lead_to_better_choices() -> None:
    judge, _, first_s = stepped(plain(), 4)
    assert judge.best and judge.best[0].fits and judge.best[0].value < first_s
    assert judge.best[0] == min(judge.seen.values())
    assert judge.work > 0


def test_no_step_simulates_what_is_hopeless() -> None:
    asked = plain()
    judge, sketches = Judge(asked), Sketches(asked)
    start = sketches.choice(Draft(4, 0, stopped=True, recompute=1.0))
    assert start
    improver = Improver(judge, sketches, lambda _: True, timed=True)
    assert not list(improver.climb(start, judge(start))) and len(judge.seen) == 1


def test_refitting_saves_only_where_memory_is_short() -> None:
    asked = TINY["tight"]()
    ample = replace(asked, constraints=())
    for given in (asked, ample):
        sketches = Sketches(given)
        whole = sketches.choice(Draft(1, 0, stopped=True, recompute=1.0))
        assert whole
        again = sketches.refitted(whole)
        short = max(load.memory for load in sketches.loads(sketches.shifted(whole, -99))) > 1
        assert any(s.recompute or s.saved for s in again.stages) == short


def test_starts_are_the_best_of_different_families() -> None:
    judge, _, _ = stepped(plain(), 4)
    found = starts(judge, 3)
    assert len({family(choice) for choice, _ in found}) == len(found) > 1
    assert judge.best and found[0] == (judge.best[1], judge.best[0])


def test_two_steps_lead_out_of_where_one_leads_nowhere() -> None:
    judge, improver, _ = stepped(plain(), 4)
    assert judge.best
    least, start = judge.best
    fresh = replace(improver, judge=Judge(judge.problem))
    far = list(fresh._far(start, tight=False))
    assert far and all(choice.num_microbatches != start.num_microbatches for choice in far)
    assert any(choice.stages[0].dp != start.stages[0].dp for choice in far)
    assert min(map(judge, far)) >= least


def test_work_that_some_starts_leave_goes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(plain(), steps=64)
    list(explorer._pipelines())
    first = starts(explorer.judge, 8)[0][0]
    assert len(starts(explorer.judge, 8)) > 1

    def climb(self: Explorer, choice: Choice) -> Iterator[Choice]:
        while choice == first:  # all others are at their best at once
            self.judge.work += 1
            yield choice

    monkeypatch.setattr(Explorer, "_climb", climb)
    before = explorer.judge.work
    list(explorer._polish(100.0))
    assert 100 <= explorer.judge.work - before <= 110


def test_rows_are_made_once(tmp_path: Path) -> None:
    made = []

    def make(value: int) -> dict[str, int]:
        made.append(value)
        return {"value": value}

    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert Rows(path).once(("a", 1), make, 5)["value"] == 5
    assert made == [5]
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a 1"]
