"""A search ends when its time is up, whatever it is doing, and leaves a plan if there is one."""

import itertools
import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir import deadline
from meshwright.ir.deadline import TimeUp, check_time, until
from meshwright.ir.errors import Infeasible, TraceError
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.ir.trace import within
from meshwright.ir.trace.trace import trace
from meshwright.planner.across import run_classes
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.complete import complete, least_excess
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.search import search, search_problem
from tests.planner.chains import chain, machine, problem

SLACK_S = 4.0
"""For the step that goes on when time is up, beside a quarter of the limit; machines are shared."""


def test_a_plan_is_left_where_tables_take_longer_than_there_is() -> None:
    asked = problem(1200, 8, 4)
    began = time.monotonic()
    plan = search_problem(asked, "ilp", time_limit_s=0.5)
    assert time.monotonic() - began < 0.5 * 1.25 + SLACK_S
    assert not plan.verify(asked.graph, asked.cluster)
    assert plan.evidence and not plan.evidence.exhausted
    known = plan.evidence.bound_s
    assert 0 <= known <= plan.predicted.step_s if plan.predicted else False
    assert loads(dumps(plan)).hash == plan.hash


def test_models_too_deep_for_tables_get_equal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = make_problem(chain(2500, 8), machine(4), precision="fp32", optimizer="sgd")
    assert len(deep.graph.blocks) > run_classes.DEEP
    began = time.monotonic()
    plan = search_problem(deep, time_limit_s=3)
    assert time.monotonic() - began < 3 * 1.25 + SLACK_S
    assert not plan.verify(deep.graph, deep.cluster)
    assert plan.evidence and plan.evidence.bound_s == 0 and not plan.evidence.exhausted
    assert "no bound is known" in str(plan)


def test_pins_hold_where_time_is_up() -> None:
    asked = problem(1200, 8, 4, "pp=2", "recompute=full", "schedule=gpipe")
    plan = search_problem(asked, "ilp", time_limit_s=0.3)
    assert len(plan.schedule.rows) == 2 and plan.schedule.name == "gpipe"
    assert all("full" in stage.recompute.values() for stage in plan.stages)


@pytest.mark.parametrize("pins", [(), ("pp=2", "schedule=gpipe")])
def test_time_that_is_up_before_anything_is_priced_leaves_a_plan(pins: tuple[str, ...]) -> None:
    """As on a machine where others compute: the clock goes on, and nothing is done by then."""
    asked = problem(4, 8, 2, *pins)
    plan = search_problem(asked, "ilp", time_limit_s=-100)
    assert not plan.verify(asked.graph, asked.cluster)
    assert not pins or plan.schedule.name == "gpipe"


def test_time_that_is_up_is_told_with_what_came_nearest() -> None:
    with pytest.raises(Infeasible, match=r"the nearest \(.*\) needs .* on a rank, .* too much"):
        search_problem(problem(4, 8, 2, "memory<=1MB"), "ilp", time_limit_s=-100)


def test_what_fits_nowhere_ends_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(Infeasible):
        search_problem(problem(600, 8, 4, "memory<=1MB"), time_limit_s=1)
    assert time.monotonic() - began < 1.25 + SLACK_S
    began = time.monotonic()
    nearest = least_excess(problem(600, 8, 4, "memory<=1MB"), 0.5)  # as `check` of one by hand does
    assert nearest is None or nearest.predicted
    assert time.monotonic() - began < 0.5 + SLACK_S


@pytest.mark.parametrize(("limit_s", "order"), [(60, "stores first"), (-1, "first stores")])
def test_equal_stages_are_gone_through_once(
    limit_s: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After stores on the host; before them where time is up, as they take a search each."""
    tried: list[str] = []
    driver = "meshwright.planner.search.search"
    monkeypatch.setattr(f"{driver}.run", lambda *_: SearchLog())
    monkeypatch.setattr(f"{driver}.take_first", lambda *_: tried.append("first"))
    monkeypatch.setattr(f"{driver}.relieve", lambda *_: tried.append("stores"))
    with pytest.raises(Infeasible, match="time limit"):
        search_problem(problem(4, 8, 2), "ilp", time_limit_s=limit_s)
    assert " ".join(tried) == order


class _Deep(nn.Module):
    """More layers than seconds."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_a_trace_that_takes_too_long_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later than the one before."""
    clock = itertools.count()
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(deadline, name, lambda: float(next(clock)))
    asked = partial(search, _Deep(200), machine(2), example_inputs=torch.ones(4, 4), progress=False)
    with pytest.raises(TraceError, match=r"longer than 30 s.*--time-limit 60"):
        asked(time_limit_s=5)
    assert next(clock) < 20, "at once: forward has two fifths of it"
    with pytest.raises(TraceError, match="longer than 50 s"):
        complete({"tp": 2}, _Deep(200), machine(2), example_inputs=torch.ones(4, 4),
                 time_limit_s=50)  # fmt: skip
    with within.traced_within(1e6):
        assert trace(_Deep(2), torch.ones(4, 4)).blocks


def test_the_earlier_deadline_counts() -> None:
    check_time()
    with until(time.monotonic() - 1), until(time.monotonic() + 99), pytest.raises(TimeUp):
        check_time()
    check_time()
