"""Forwards and backwards that run together: what may be a pair, what that hides and holds, and that
search takes it. (That training is that of one process: `test_sampled`.)"""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.block.overlap import NOTHING, PhaseTimes
from meshwright.costmodel.block.paired import CoursePart, Cut, hidden_s
from meshwright.costmodel.simulate.replay import replay
from meshwright.costmodel.stage.program import NO_SLOWDOWN
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.beside import blocks_wait
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import check_schedule, parse_schedule
from meshwright.ir.plan.verify import check, verify
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail, predict_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.finish import variants
from meshwright.planner.search.search import search_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.models import CASES
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks
from tests.overlap_plans import machine, planned
from tests.planner.problems import problem
from tests.traces import zoo_graph

PAIRS: dict[str, Any] = {"pp": 2, "num_microbatches": 4, "schedule": "dual_pipe_v_pairs"}


@pytest.mark.parametrize(
    ("rows", "broken"),
    [
        (("0F0 1F0+1B0 0B0",), "one micro-batch"),
        (("0F0 0F1+0B0 0B1",), "both are of stage 0"),
        (("0F0 1F0 1B0+0F1 0B0 1F1 1B1 0B1",), "an F and a whole B after it"),
        (("0F0 1F0 0F1+1I0 1W0 0B0 1F1 1B1 0B1",), "an F and a whole B after it"),
        (("0F0 1F0 0F1+1B0+0B0 1F1 1B1 0B1",), "two actions"),
        (("0F0 3F0 3B0 0F1 3F1+0B0 3B1 0B1", "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1"), ""),
    ],
)
def test_what_may_be_a_pair(rows: tuple[str, ...], broken: str) -> None:
    if not broken:
        check_schedule(parse_schedule("x", rows))
        return
    with pytest.raises(PlanError, match=broken):
        check_schedule(parse_schedule("x", rows))


def test_a_pair_waits_for_what_either_needs() -> None:
    """One after the other these end: the gradient that the pair needs comes of its forward."""
    waits = ("0F0 2F0 0F1+2B0 2F1 2B1 0B0 0B1", "1F0 3F0 1F1 3B0 3F1 3B1 1B0 1B1")
    check_schedule(parse_schedule("x", tuple(row.replace("+", " ") for row in waits)))
    with pytest.raises(PlanError, match=r"deadlocks: rank 0 at 0F1\+2B0, rank 1 at 1F1"):
        check_schedule(parse_schedule("x", waits))


def test_both_hide_what_the_other_computes() -> None:
    """A forward of 2 s, 3 s on the way, 2 s; a backward of 1, 2 and 1: alone 7 and 4 s. Together
    the second message waits for the first, and all ends after 8 s."""
    phases = PhaseTimes([2.0, 2.0], [1.0, 1.0], [3.0], [2.0])
    part = CoursePart(Cut(NOTHING, phases, NO_SLOWDOWN), 0.0)
    assert hidden_s((part,), (part,)) == pytest.approx(3.0)
    whole = CoursePart(None, 4.0)
    assert hidden_s((part,), (whole,)) == pytest.approx(3.0), "4 s of work beside 3 s on the way"
    assert hidden_s((whole,), (whole,)) == 0.0


def paired(machine_of: Cluster, **choice: Any) -> tuple[Problem, Plan]:
    graph, plan = planned("gpt2", 8, "none", tp=2, **PAIRS, **choice)
    asked = problem(graph, machine_of)
    return asked, replace(plan, precision="fp32")


def test_a_pair_takes_less_than_its_actions_one_after_the_other() -> None:
    asked, plan = paired(machine(4))
    assert paired_stages(plan) == {0, 1, 2, 3} and not blocks_wait(plan)
    rows = tuple(row.replace("+", " ") for row in plan.schedule.rows)
    apart = replace(plan, schedule=replace(plan.schedule, rows=rows))
    together, alone = (predict_plan(asked, one) for one in (plan, apart))
    assert together.breakdown and alone.breakdown
    assert together.step_s < 0.97 * alone.step_s
    assert together.breakdown.tensor_s < 0.9 * alone.breakdown.tensor_s


def test_a_report_shows_what_pairs_take() -> None:
    asked, plan = paired(machine(4))
    rows = tuple(row.replace("+", " ") for row in plan.schedule.rows)
    left_s = []
    for one in (plan, replace(plan, schedule=replace(plan.schedule, rows=rows))):
        made = in_detail(asked, replace(one, predicted=predict_plan(asked, one)))
        assert made.predicted and made.predicted.detail
        left_s.append(made.predicted.step_s - replay(made).timeline.step_s)
        assert bool(made.predicted.detail.stage(0).pairs) == ("+" in one.schedule.rows[0])
    assert left_s[0] == pytest.approx(left_s[1], rel=1e-4), "but for what comes after the schedule"


def test_what_goes_with_pairs() -> None:
    _, plan = paired(machine(4))
    check(plan)
    for change, rule in (({"overlap": "block"}, "overlap"), ({"compile": True}, "compile")):
        stages = tuple(replace(stage, **change) for stage in plan.stages)
        found = [f for f in verify(replace(plan, stages=stages)) if f.severity == "error"]
        assert {f.rule for f in found} == {rule} and len(found) == 4


COUNTS = [4, 8, 2]
"""Of micro-batches that are tried of a plan of 4, of 8 samples."""


def test_finished_plans_are_tried_with_pairs_and_a_pin_asks_for_them() -> None:
    graph, _ = planned("gpt2", 8, "none", tp=2, **PAIRS)
    asked = problem(graph, machine(4), constraints=("pp=2", "tp=2"))
    base = build_plan(asked, uniform_choice(asked, pp=2, tp=2, num_microbatches=4))
    tried, *more = variants("paired", asked, base)
    assert [p.num_microbatches for p in (tried, *more)] == COUNTS
    assert (
        paired_stages(tried) == {0, 1, 2, 3} and [s.overlap for s in tried.stages] == ["none"] * 4
    )
    check(tried, graph, asked.cluster)
    assert [s.devices for s in tried.stages] == [base.stages[i].devices for i in (0, 1, 1, 0)]
    pinned = problem(graph, machine(4), constraints=("pp=2", "tp=2", "schedule=dual_pipe_v_pairs"))
    found, free = search_problem(pinned, "ilp"), search_problem(asked, "ilp")
    assert found.schedule.name == "dual_pipe_v_pairs" and found.predicted and free.predicted
    assert free.predicted.step_s <= found.predicted.step_s, "a pin does not help"
    for count in COUNTS[1:]:
        asked_for = (*pinned.constraints, parse_constraint(f"num_microbatches={count}"))
        other = search_problem(problem(graph, machine(4), constraints=asked_for), "ilp")
        assert other.predicted and free.predicted.step_s <= other.predicted.step_s, count
    assert found.evidence and 0 < found.evidence.bound_s <= found.predicted.step_s
    assert any("run together in pairs" in note for note in found.notes)


def test_pairs_hold_no_more_than_predicted() -> None:
    """On the CPU that runs it; what recomputed blocks hold where they stop counts as all that they
    hold at most, so up to 30 % more is predicted."""
    made = [_in_memory(recompute) for recompute in ("none", "full")]
    found = run_ranks(4, _peaks, [plan for plan, _ in made])
    for number, (plan, predicted) in enumerate(made):
        for index in (0, 1):
            tracked = max(found[rank][number] for rank in plan.stages[index].devices)
            room = predicted.stages[index].memory.tensor_bytes / tracked
            assert 0.99 <= room <= 1.3, (plan.stages[index].recompute, room)


def _in_memory(recompute: str) -> Any:
    graph, plan = planned("gpt2", 32, "none", tp=2, recompute=recompute, **PAIRS)
    asked = make_problem(graph, Cluster.local(4), precision="fp64", optimizer="adam")
    return plan, predict_plan(asked, plan)


def _peaks(plans: list[Plan]) -> list[int]:
    case = CASES["gpt2"]
    graph = zoo_graph(case, 32)
    jobs = (
        compile_job(case.model(), plan, loss_fn=case.loss_fn, optimizer="adam", device="cpu",
                    graph=graph)
        for plan in plans
    )  # fmt: skip
    return [peak_of(job, case.example(32)) for job in jobs]
