"""Schedules made for plans: quicker, or fitting where no file does; and run on real ranks."""

from dataclasses import replace

import pytest

from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.ir.plan.schedule import Work
from meshwright.ir.plan.verify import check
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import MADE, SCHEDULES, stages_per_rank
from meshwright.planner.search import improve as searching
from meshwright.planner.search.found import SearchLog, pipelines
from meshwright.planner.search.plan_comparison import kind_of
from meshwright.planner.search.search import search_problem
from meshwright.planner.synthesis.choose import synthesised, with_schedule
from meshwright.planner.synthesis.solve import synthesise
from meshwright.planner.synthesis.task import Task
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from tests.planner.problems import cluster, mlp, problem
from tests.traces import zoo_graph


def piped(asked: Problem, schedule: str = "one_f_one_b", cuts: tuple[int, int] = (1, 3)) -> Plan:
    """Stages of one, two and three layers."""
    choice = uniform_choice(asked, pp=3, cuts=cuts, num_microbatches=8, schedule=schedule)
    return build_plan(asked, choice)


def fitting(asked: Problem, cuts: tuple[int, int] = (1, 3)) -> list[Plan]:
    """Under all schedules with one stage per rank."""
    plans = [piped(asked, name, cuts) for name in SCHEDULES if stages_per_rank(name) == (1,)]
    return [plan for plan in plans if not excess_bytes(asked, plan)]


def test_quicker_on_uneven_stages() -> None:
    asked = problem(mlp(6), cluster(3))
    plan = synthesised(asked, piped(asked))
    assert plan and plan.predicted and plan.schedule.name == MADE
    check(plan, asked.graph, asked.cluster)
    assert plan.predicted.step_s < min(p.predicted.step_s for p in fitting(asked) if p.predicted)
    assert loads(dumps(plan)).schedule == plan.schedule
    assert synthesised(asked, piped(asked)) == plan
    assert synthesised(asked, plan) is None  # there is nothing more to gain
    assert synthesised(asked, piped(asked), below_s=plan.predicted.step_s / 2) is None


def test_fits_where_files_do_not() -> None:
    loose, cuts = problem(mlp(6), cluster(3)), (3, 5)
    least = min(p.predicted.peak_bytes for p in fitting(loose, cuts) if p.predicted)
    tight = problem(mlp(6), cluster(3), constraints=(f"memory<={least - 1000}B",))
    assert not fitting(tight, cuts)
    plan = synthesised(tight, piped(tight, cuts=cuts))
    assert plan and excess_bytes(tight, plan) == 0
    check(plan, tight.graph, tight.cluster)


def test_pins_are_kept() -> None:
    asked = problem(mlp(6), cluster(3), constraints=("schedule=one_f_one_b",))
    assert synthesised(asked, piped(asked)) is None
    one = problem(mlp(6), cluster(1))
    assert synthesised(one, build_plan(one, uniform_choice(one, num_microbatches=8))) is None


def test_search_offers_them() -> None:
    stages = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 2}
    pins = ("pp=3", "num_microbatches=8", "recompute=none", "tp=1",
            *(f"block {block} on stage {stage}" for block, stage in stages.items()))  # fmt: skip
    by_file = [
        search_problem(problem(mlp(6), cluster(3), constraints=(*pins, f"schedule={name}")))
        for name in SCHEDULES
        if stages_per_rank(name) == (1,)
    ]
    asked = problem(mlp(6), cluster(3), constraints=pins)
    plan = search_problem(asked)
    assert plan.predicted and plan.evidence and plan.schedule.name == MADE
    assert plan.predicted.step_s < min(p.predicted.step_s for p in by_file if p.predicted)
    # Nobody has gone through all synthesised schedules: the bound is that of the relaxation.
    assert plan.evidence.bound_s < plan.predicted.step_s
    assert dumps(search_problem(asked)) == dumps(plan)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0)])
def test_runs_like_one_process(placement: tuple[int, ...]) -> None:
    """Real ranks, in float64: weight halves put off, two stages on a rank."""
    case = CASES["sequential"]
    graph = zoo_graph(case, 8)
    asked = make_problem(graph, Cluster.local(2), precision="fp64", optimizer="adam")
    folded = len(placement) == 4
    choice = uniform_choice(
        asked, pp=2, num_microbatches=4, schedule="zbv" if folded else "one_f_one_b"
    )
    times = [(1.0, 1.0, 2.0), (3.0, 2.0, 1.0), (1.0, 2.0, 3.0), (2.0, 1.0, 1.0)]
    found = synthesise(
        Task(
            stages=tuple(
                StageTimes(forward_s=f, backward_s=i + w, backward_input_s=i, backward_weight_s=w,
                           saved_bytes=1)
                for f, i, w in times[: len(placement)]
            ),
            placement=placement, num_microbatches=4, capacity_bytes=(5.0, 3.0),
        )
    )  # fmt: skip
    works = {action.work for row in found.schedule.ranks for action in row}
    assert found.schedule.name == MADE and Work.BACKWARD_WEIGHT in works
    plan = with_schedule(asked, build_plan(asked, choice), found.schedule)
    check(plan, graph, asked.cluster)
    difference = check_equal(case, replace(plan, predicted=None), graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.parametrize("searcher", ["ilp", "exhaustive"])
def test_made_schedules_can_be_pinned(searcher: str) -> None:
    pins = ("schedule=synthesised", "num_microbatches=4")
    asked = problem(mlp(4), cluster(2), constraints=pins)
    plan = search_problem(asked, searcher)
    assert plan.schedule.name == MADE and set(plan.constraints) == set(pins)
    check(plan, asked.graph, asked.cluster)
    assert plan.predicted and plan.evidence
    assert 0 < plan.evidence.bound_s <= plan.predicted.step_s * 1.001


def test_a_list_of_schedules_is_not_narrowed() -> None:
    pins = ("schedule in dapple_pa,gpipe", "pp=2", "num_microbatches=4")
    plan = search_problem(problem(mlp(4), cluster(2), constraints=pins), "exhaustive")
    assert plan.schedule.name == "dapple_pa"  # better than GPipe, and a twin of 1F1B


def test_pipelines_of_every_order_of_stages_are_kept_for_the_solver() -> None:
    """The slower V of the same kind may be the better one once a schedule is made for it."""
    asked = problem(mlp(8), cluster(2))
    made = [
        build_plan(asked, uniform_choice(asked, pp=2, cuts=cuts, num_microbatches=4, schedule=name))
        for cuts, name in (((2, 4, 6), "zbv"), ((2, 4, 6), "interleaved"), ((4,), "one_f_one_b"))
    ]
    found = SearchLog()
    for number, plan in enumerate(made):
        found.note((float(number),), 0, plan)
        found.note((float(number + 10),), 0, plan)  # a worse one changes nothing
    assert [plan.schedule.name for plan in pipelines(found)] == [p.schedule.name for p in made]
    assert len(found.kinds) == 1
    assert found.pipelines[kind_of(made[0]), 2, True][0] == (0.0,)


def test_slow_pipelines_of_which_little_is_known_do_not_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problem(mlp(8), cluster(2))
    found, possible = SearchLog(), {}
    for number, (now_s, least_s) in enumerate([(1.0, 0.9), (1.2, 0.8), (4.0, 0.5), (9.0, 0.2)]):
        plan = piped_in_two(asked, number)
        plan = replace(plan, predicted=replace(plan.predicted, step_s=now_s))
        found.pipelines[str(number), 1, False] = (now_s,), 0, plan
        possible[plan.num_microbatches] = least_s
    tried: list[int] = []
    monkeypatch.setattr(searching, "possible_s", lambda _, plan: possible[plan.num_microbatches])
    monkeypatch.setattr(
        searching, "synthesised", lambda _, plan, below_s: tried.append(plan.num_microbatches)
    )
    searching._make_schedules(asked, found, float("inf"))
    assert [list(possible).index(count) for count in tried] == [0, 1, 3]


def piped_in_two(asked: Problem, number: int) -> Plan:
    choice = uniform_choice(
        asked, pp=2, cuts=(4,), num_microbatches=2**number, schedule="one_f_one_b"
    )
    return build_plan(asked, choice)
