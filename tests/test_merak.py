"""Merak's schedules and stage-aware recompute: run on real ranks, and found by search."""

from dataclasses import replace

import pytest

from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.forms.retention import check as check_retention
from meshwright.forms.retention import findings
from meshwright.forms.retention.stage_aware import share
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import EARLY
from meshwright.ir.plan.verify import check
from meshwright.planner.pins.constraints import MemoryCap
from meshwright.planner.problem.by_stage import is_shared_out, shared_out
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES, make_schedule, recomputes_early
from meshwright.planner.search.finish import variants
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from tests.planner.problems import cluster, mlp, problem
from tests.traces import zoo_graph

NAMES = tuple(name for name in SCHEDULES if recomputes_early(name))


def gpt2(world: int) -> Problem:
    case = CASES["gpt2"]
    graph = zoo_graph(case, 8)
    return make_problem(graph, Cluster.local(world), precision="fp64", optimizer="adam")


@pytest.mark.parametrize("name", NAMES)
def test_uneven_stages_equal_one_process(name: str) -> None:
    """Four stages of unequal length, eight micro-batches."""
    asked = gpt2(4)
    choice = uniform_choice(
        asked, pp=4, num_microbatches=8, schedule=name, recompute="full", cuts=(1, 2, 5)
    )
    plan = build_plan(asked, choice)
    check(plan, asked.graph, asked.cluster)
    difference = check_equal(CASES["gpt2"], plan, asked.graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_stage_aware_zero3_with_values_made_again_equals_one_process() -> None:
    """Shards of parameters are gathered for what is made again early; one stage makes single values
    again instead of blocks."""
    asked = gpt2(4)
    choice = uniform_choice(
        asked, pp=2, dp_shard=2, zero=3, num_microbatches=4, schedule=NAMES[0], recompute="full"
    )
    plan = build_plan(asked, choice)
    plan = replace(plan, stages=shared_out(plan, asked.graph, "stage_aware", 0.5))
    assert [len(stage.recompute) for stage in plan.stages] == [1, 0]
    layer = next(b for b in plan.stage_blocks(asked.graph, 1) if "h" in b.name)
    stages = (plan.stages[0], replace(plan.stages[1], saved={layer.name: {"*act*": "recompute"}}))
    rows = tuple(row.replace("1K", "1F") for row in plan.schedule.rows)
    early = " ".join(f"1F{m} 1R{m} 1B{m}" for m in range(4))
    plan = replace(
        plan, stages=stages, schedule=replace(plan.schedule, rows=(rows[0], early)), predicted=None
    )
    check(plan, asked.graph, asked.cluster)
    difference = check_equal(CASES["gpt2"], plan, asked.graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_ratios_are_those_of_the_paper() -> None:
    assert share(4, 0.75) == pytest.approx((0.75, 1 - 0.25 * 3 / 3, 1 - 0.25 * 3 / 2, 0.0))
    assert share(8, 0.25) == pytest.approx((0.25, 0.25, 0.125, *(0.0,) * 5))
    assert share(1, 0.5) == (0.0,)


@pytest.mark.parametrize("first,gain", [(0.75, 1.219), (0.5, 1.260), (0.25, 1.296)])
def test_stage_aware_gains_what_the_paper_says(first: float, gain: float) -> None:
    """8 stages, 16 micro-batches; 92 units under 1F1B with all recomputed."""
    costs = [
        StageTimes(forward_s=1.0, backward_s=2.0 + r, again_s=r) for r in share(8, first)
    ]  # fmt: skip
    schedule = make_schedule("full_critical_path_1f1b", 8, 16, 8)
    assert 92 / simulate(schedule, costs).step_s == pytest.approx(gain, abs=0.0005)


def machine() -> Cluster:
    """Four devices on which the runtime costs nothing."""
    found = cluster(4)
    return replace(found, device_types=(replace(found.device_types[0], kind="cuda"),))


def recomputing(asked: Problem) -> Plan:
    choice = uniform_choice(asked, pp=4, num_microbatches=8, recompute="full")
    return build_plan(asked, choice)


def test_each_schedule_is_quicker_than_the_one_before_and_none_needs_more_than_it_says() -> None:
    asked = problem(mlp(8), machine())
    plain = recomputing(asked)
    found = {p.schedule.name: p for p in variants("early_recompute", asked, plain)}
    order = [plain, *(found[n] for n in ("pre_recompute_1f1b", "last_no_recompute_1f1b",
                                         "full_critical_path_1f1b"))]  # fmt: skip
    steps = [p.predicted.step_s for p in order if p.predicted]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    for plan in order[1:]:
        check(plan, asked.graph, asked.cluster)
        assert plan.predicted and plain.predicted
        assert plan.predicted.peak_bytes >= plain.predicted.peak_bytes


FILES = "schedule in one_f_one_b," + ",".join(NAMES)


def test_search_picks_one_where_stages_recompute() -> None:
    pins = ("pp=4", "num_microbatches=8", "recompute=full", "tp=1")

    def found(*more: str) -> Plan:
        return search_problem(problem(mlp(8), machine(), constraints=(*pins, *more)), "ilp")

    plan = found(FILES)
    assert plan.schedule.name in NAMES
    assert any(action.work in EARLY for row in plan.schedule.parse().ranks for action in row)
    assert plan.evidence and plan.predicted and plan.evidence.bound_s <= plan.predicted.step_s
    assert found("schedule=one_f_one_b").schedule.name == "one_f_one_b"
    assert found(f"schedule={NAMES[0]}").schedule.name == NAMES[0]


def test_search_recomputes_less_in_later_stages_where_memory_is_short() -> None:
    asked = problem(mlp(16), machine())
    plain = recomputing(asked)
    assert plain.predicted
    tight = replace(asked, constraints=(MemoryCap(int(plain.predicted.peak_bytes * 1.2)),))
    tried = list(variants("recompute", tight, plain))
    assert tried and tried[-1].predicted and excess_bytes(tight, tried[-1]) == 0
    assert tried[-1].predicted.step_s < plain.predicted.step_s
    counts = [len(stage.recompute) for stage in tried[-1].stages]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0 < counts[0]


def test_stage_aware_can_be_pinned() -> None:
    pins = ("pp=4", "num_microbatches=8", "tp=1", "schedule=one_f_one_b", "store=zero")

    def found(*more: str) -> Plan:
        return search_problem(problem(mlp(16), machine(), constraints=(*pins, *more)), "ilp")

    full, kept = found("recompute=full"), found("recompute=none")
    assert full.predicted and kept.predicted
    room = (full.predicted.peak_bytes + kept.predicted.peak_bytes) // 2
    plan = found("recompute=stage_aware", f"memory<={room}B")
    counts = [len(stage.recompute) for stage in plan.stages]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0 < counts[0]
    assert is_shared_out(plan, mlp(16), "stage_aware")
    assert not is_shared_out(full, mlp(16), "stage_aware")
    assert plan.predicted and plan.predicted.peak_bytes <= room
    assert kept.predicted.step_s < plan.predicted.step_s < full.predicted.step_s
    with pytest.raises(PlanError, match="write recompute=stage_aware"):
        problem(mlp(16), machine(), constraints=("stage 0 recompute=stage_aware",))


def test_what_is_offloaded_is_not_kept_too() -> None:
    asked = problem(mlp(8), machine())
    plan = next(variants("early_recompute", asked, recomputing(asked)))
    stage = replace(plan.stages[1], recompute={}, saved={"layers.*": {"*": "offload"}})
    found = replace(plan, stages=(plan.stages[0], stage, *plan.stages[2:]))
    (finding,) = findings(found)
    assert finding.rule == "schedule" and "what is to be 'offload'" in finding.message
    with pytest.raises(PlanError, match="a schedule without K and R"):
        check_retention(found)
    check_retention(plan)
