"""Comparison of a prediction with hand-made measurements."""

from dataclasses import replace

import pytest

from meshwright.costmodel.explain.compare import compare, expected_of
from meshwright.ir.errors import MismatchError, PlanError
from meshwright.ir.plan.plan import Plan, ScheduleTable
from meshwright.ir.plan.plan_io import rehash
from tests.costmodel.explain.runs import predicted_plan, run_of, runs_of


def rows_of(plan: Plan) -> dict[tuple[str, str], object]:
    found = compare(plan, expected_of(plan), runs_of(plan))
    return {(row.group, row.what): row for row in found.rows}


def test_errors_are_exact():
    plan = predicted_plan()
    rows = rows_of(plan)
    found = compare(plan, expected_of(plan), runs_of(plan))
    assert found.step.measured == 1.125 and found.step.error == pytest.approx(1 / 1.125 - 1)
    # The slower replica counts.
    assert rows["action", "stage 0 F"].error == pytest.approx(0.05 / 0.0625 - 1)
    assert rows["action", "stage 0 B"].error == pytest.approx(0.0)
    assert rows["action", "stage 1 F"].error == pytest.approx(0.0)
    assert rows["action", "stage 1 B"].error == pytest.approx(0.25)
    assert rows["action", "stage 0 B"].per_step_s == pytest.approx(0.1 * 4)
    # The rank that comes last to a collective waits for nobody.
    reduce = rows["collective", "stage 0 gradients all_reduce 1000 B on dp"]
    assert reduce.measured == pytest.approx(0.032) and reduce.error is None
    assert rows["synchronisation", "stage 0"].error == pytest.approx(0.03 / 0.025 - 1)
    assert rows["optimizer", "stage 0"].error == pytest.approx(0.02 / 0.025 - 1)
    assert rows["waiting", "stage 1"].measured == pytest.approx(0.01 * 8)


def test_memory_is_that_of_the_worst_rank():
    rows = rows_of(predicted_plan())
    assert rows["memory", "stage 0 tensors, all"].error == pytest.approx(500 / 500 - 1)
    assert rows["memory", "stage 1 tensors, all"].error == pytest.approx(500 / 1000 - 1)
    assert rows["memory", "stage 0 tensors, rest"].error == pytest.approx(80 / 80 - 1)
    for index, added in ((0, 1200), (1, 1800)):
        before = rows["memory", f"stage {index} process, before the job"]
        assert before.error == pytest.approx(1300 / 1000 - 1)
        grown = rows["memory", f"stage {index} process, added by the job"]
        assert grown.error == pytest.approx(500 / added - 1)


def test_a_process_that_nobody_measured_is_not_predicted():
    plan = predicted_plan()
    assert plan.predicted
    stages = tuple(
        replace(s, memory=replace(s.memory, process_bytes=0)) for s in plan.predicted.stages
    )
    rows = rows_of(rehash(replace(plan, predicted=replace(plan.predicted, stages=stages))))
    assert rows["memory", "stage 0 process, before the job"].predicted is None
    assert rows["memory", "stage 0 process, added by the job"].predicted == 500


def test_what_a_gpu_reserves_is_all_that_the_job_adds():
    plan = predicted_plan()
    runs = tuple(
        replace(m, memory=replace(m.memory, cuda_reserved_bytes=625)) for m in runs_of(plan)
    )
    rows = {(r.group, r.what): r for r in compare(plan, expected_of(plan), runs).rows}
    assert rows["memory", "stage 0 process, added by the job"].error == pytest.approx(-0.2)
    assert ("memory", "stage 0 process, before the job") not in rows


def test_the_worst_comes_first():
    plan = predicted_plan()
    errors = [row.error for row in compare(plan, expected_of(plan), runs_of(plan)).rows]
    known = [abs(error) for error in errors if error is not None]
    assert known == sorted(known, reverse=True)
    assert errors[len(known) :] == [None] * (len(errors) - len(known))


@pytest.mark.parametrize(
    ("step_s", "band", "inside"), [(1.0, 0.2, True), (1.0, 0.1, False), (1.5, 0.2, False)]
)
def test_the_verdict_says_whether_the_band_holds(step_s, band, inside):
    plan = predicted_plan(step_s, band)
    found = compare(plan, expected_of(plan), runs_of(plan))
    assert found.inside is inside
    assert ("OUTSIDE" not in found.verdict) is inside
    assert f"{step_s / 1.125 - 1:+.1%}" in found.verdict


def test_a_run_of_another_plan_is_refused():
    plan = predicted_plan()
    others = (run_of(plan, 0), replace(run_of(plan, 1), plan="0" * 64), run_of(plan, 2))
    with pytest.raises(MismatchError, match="the run is of plan 000000000000"):
        compare(plan, expected_of(plan), others)


def test_what_cannot_be_compared_is_refused():
    plan = predicted_plan()
    with pytest.raises(PlanError, match="no prediction"):
        expected_of(replace(plan, predicted=None))
    short = tuple(replace(m, steps=m.steps[:1]) for m in runs_of(plan))
    with pytest.raises(PlanError, match="no timed step"):
        compare(plan, expected_of(plan), short)


def test_what_ranks_do_for_several_stages_is_one_row():
    """Stages 0 and 1 on the same ranks: their optimizer steps are one phase."""
    plan = predicted_plan()
    first = plan.stages[0]
    stages = tuple(replace(s, devices=(0, 1), batch_shares=(3, 3), mesh=first.mesh)
                   for s in plan.stages)  # fmt: skip
    row = " ".join(f"0F{i} 1F{i} 1B{i} 0B{i}" for i in range(4))
    both = rehash(replace(plan, stages=stages, schedule=ScheduleTable(name="one", rows=(row,))))
    runs = tuple(replace(run_of(both, rank), world_size=2) for rank in range(2))
    rows = {(r.group, r.what): r for r in compare(both, expected_of(both), runs).rows}
    assert rows["optimizer", "stage 0+1"].error == pytest.approx(2 * 0.02 / 0.025 - 1)
    assert rows["memory", "stage 0+1 tensors, all"].predicted == 500
    assert ("optimizer", "stage 0") not in rows
