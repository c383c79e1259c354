"""What an exact search holds when its time is up: frames of one stage are known at once."""

from collections.abc import Callable, Sequence

import pytest

from meshwright.ir.deadline import TimeUp
from meshwright.planner.across.frame_search import FrameSearch
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.take import take
from meshwright.planner.searchers import ilp
from tests.planner.problems import cluster, mlp, problem

Fastest = Callable[..., Sequence[object]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """Without the plain choices that come before all frames: the best may be among them."""
    monkeypatch.setattr(ilp._Search, "_first", lambda self: iter(()))
    return problem(mlp(6), cluster(4, slow=True))


def _held(given: Problem, fastest: Fastest, monkeypatch: pytest.MonkeyPatch) -> SearchLog:
    """What is held at the end, or when time is up."""
    monkeypatch.setattr(FrameSearch, "fastest", fastest)
    found = SearchLog()
    try:
        for offer in ilp.search(given):
            take(given, offer, found)
    except TimeUp:
        pass
    return found


def test_frames_of_one_stage_come_first(given: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Frame]()

    def nothing(self: FrameSearch, frame: Frame, *more: object) -> list[object]:
        asked.append(frame)
        return []

    _held(given, nothing, monkeypatch)
    ranks = [frame.num_ranks for frame in asked]
    single = ranks.count(1)
    assert 0 < single < len(asked)
    assert set(ranks[:single]) == {1}


def test_what_the_first_frame_has_is_held_at_once(
    given: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest, asked = FrameSearch.fastest, list[Frame]()
    whole = _held(given, fastest, monkeypatch).best
    assert whole and whole.predicted

    def once(self: FrameSearch, frame: Frame, *more: object) -> Sequence[object]:
        asked.append(frame)
        if len(asked) > 1:
            raise TimeUp
        return fastest(self, frame, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(ilp, "CLOSE", 100.0)  # else no other frame is looked at
    best = _held(given, once, monkeypatch).best
    assert len(asked) == 2 and best and best.predicted
    assert len(best.stages) == 1
    assert best.predicted.step_s <= 1.1 * whole.predicted.step_s
