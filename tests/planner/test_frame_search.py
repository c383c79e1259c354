"""The best stages of a frame do not depend on the limit that longer ones are left out by."""

from typing import Any

import numpy as np
import pytest

from meshwright.planner.across.frame_search import FrameSearch
from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.across.stage_options import Figures
from meshwright.planner.across.stage_tables import Case
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.bounds.relaxation import Bound, Relaxation
from tests.planner.problems import cluster, mlp, problem

FRAMES = [Frame(1, 1), Frame(2, 4), Frame(4, 8)]


def solver(memory: str) -> tuple[FrameSearch, Relaxation]:
    asked = problem(mlp(8), cluster(4), constraints=(f"memory<={memory}",))
    runs, places = RunCosts(asked), [Places(asked, order) for order in orders(asked)]
    return FrameSearch(runs, places[0], Treatments(asked)), Relaxation(runs, places)


@pytest.mark.parametrize("memory", ["1GB", "90kB"])
@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_a_limit_leaves_what_is_below_it(frame: Frame, memory: str) -> None:
    search, relaxation = solver(memory)
    bound = relaxation.bound(frame)
    free = search.fastest(frame, bound, np.inf)
    assert free
    for factor in (1.0001, 1.2, 3.0):
        limit_s = factor * free[0].value
        found = search.fastest(frame, bound, limit_s)
        assert found[0] == free[0]
        assert [f for f in free if f.value <= limit_s] == [f for f in found if f.value <= limit_s]


def test_nothing_is_put_together_where_all_is_longer() -> None:
    frame = Frame(4, 8)
    free, _ = solver("1GB")
    kept = free.fastest(frame, Bound(0.0, ()), np.inf)[0].value
    search, relaxation = solver("90kB")
    made: list[str] = []
    entry = search.tables.entry

    def counted(case: Case, mode: str, *rest: Any) -> Figures:
        made.append(mode)
        return entry(case, mode, *rest)

    search.tables.entry = counted  # type: ignore[method-assign]
    bound = relaxation.bound(frame)
    assert search.fastest(frame, bound, 0.99 * kept) == []
    assert set(made) == {"keep"}
    assert search.fastest(frame, bound, np.inf)
    assert set(made) > {"keep"}
