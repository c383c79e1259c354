"""The accuracy harness: its statistics, its files and its page, from figures made by hand."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.accuracy import measure as accuracy_measure
from benchmarks.accuracy.data import (
    KINDS,
    Measured,
    Predicted,
    read_measured,
    read_predicted,
    write,
)
from benchmarks.accuracy.measure import base_bytes, by_kind
from benchmarks.accuracy.models import SUBJECTS, Subject
from benchmarks.accuracy.plans import (
    ALWAYS,
    FOUR,
    ON_FOUR,
    ON_TWO,
    POOL,
    TWO,
    apart,
    plan_of,
)
from benchmarks.accuracy.report import (
    at_usual_pace,
    quantile,
    ranks,
    report,
    rows_of,
    spearman,
)
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.comm.collective import What
from meshwright.ir.plan.schedule import Action, Work
from meshwright.ir.plan.verify import check
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.record.record import Collected, Passed, Section, StepRecord

MIB = 2**20


def expected(plan: str, step_s: float, **changes) -> Predicted:
    made = Predicted(
        model="small", plan=plan, ranks=2, hash=plan, step_s=step_s, error_band=0.1,
        source="measured", seconds=dict.fromkeys(KINDS, step_s / len(KINDS)),
        base_bytes=300 * MIB, tensor_bytes=100 * MIB, resident_bytes=400 * MIB,
        made_at="2026-11-21T10:00:00+00:00",
    )  # fmt: skip
    return replace(made, **changes)


def run(plan: str, step_s: float, turn: int = 0, **changes) -> Measured:
    made = Measured(
        model="small", plan=plan, ranks=2, hash=plan, turn=turn,
        started_at="2026-11-21T10:05:00+00:00", pace=1.0,
        steps_s=((step_s,), (step_s,)), step_s=step_s,
        seconds=dict.fromkeys(KINDS, step_s / len(KINDS)), cpu_s=2 * step_s,
        base_bytes=(300 * MIB, 300 * MIB), resident_bytes=(400 * MIB, 500 * MIB),
        tensor_bytes=(80 * MIB, 90 * MIB),
    )  # fmt: skip
    return replace(made, **changes)


def test_quantiles_lie_between_neighbours():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    assert quantile([7.0], 0.9) == 7.0
    assert quantile([1.0, 2.0, 3.0], 1.0) == 3.0


def test_equal_values_share_their_ranks():
    assert ranks([10.0, 30.0, 10.0, 20.0]) == [0.5, 3.0, 0.5, 2.0]


def test_spearman_sees_order_alone():
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)  # 1 - 6 * 4 / (4 * 15)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_a_plan_is_compared_with_the_mean_of_its_runs_and_its_worst_rank():
    (row,) = rows_of([expected("a", 1.1)], [run("a", 0.9), run("a", 1.1, turn=1)])
    assert row.step_s == pytest.approx(1.0)
    assert row.step_error == pytest.approx(0.1)
    assert row.noise == pytest.approx(0.2)
    assert row.resident_error == pytest.approx(400 / 500 - 1)
    assert row.tensor_error == pytest.approx(100 / 90 - 1)


def test_steps_are_told_at_the_pace_in_the_middle_of_a_models_runs():
    """What fixed work takes elsewhere plays no part; what the clock showed is kept."""
    runs = [run("a", 1.0, pace=1.2), run("b", 2.0, pace=0.9), run("c", 3.0, pace=0.8)]
    told = at_usual_pace([*runs, run("a", 1.0, model="other", pace=2.0)])
    assert [one.pace for one in told] == pytest.approx([1.2 / 0.9, 1.0, 0.8 / 0.9, 1.0])
    assert [one.step_s for one in told] == pytest.approx([0.9, 1.8, 2.7, 2.0])
    assert told[1].steps_s[1] == pytest.approx((1.8,))
    assert sum(told[1].seconds.values()) == pytest.approx(1.8)
    (row,) = rows_of([expected("a", 1.5)], told[:1])
    assert row.step_error == pytest.approx(1.5 / 0.9 - 1)
    assert row.clock_error == pytest.approx(1.5 / 1.2 - 1)


def test_what_the_measuring_itself_holds_is_in_the_base(monkeypatch):
    """A run holds the fixed work too, which times the machine: no job has added it."""
    subject = Subject("tiny", lambda: nn.Linear(4, 4), lambda size, _: (torch.ones(size, 4),), 2)

    def base_with(held: int) -> int:
        def work() -> torch.Tensor:
            torch.ones(2 * held)  # freed at once
            return torch.ones(held)

        monkeypatch.setattr(accuracy_measure, "FixedWork", work)
        return base_bytes(subject, 1)

    assert base_with(16 * MIB) - base_with(1) == pytest.approx(64 * MIB, abs=8 * MIB)


def test_runs_of_another_plan_do_not_count():
    assert rows_of([expected("a", 1.0)], [run("a", 1.0, hash="changed")]) == []


def test_excess_says_where_the_error_comes_from():
    longer = dict.fromkeys(KINDS, 0.0) | {"wait": 0.3}
    measured = dict.fromkeys(KINDS, 0.0) | {"wait": 0.1}
    (row,) = rows_of([expected("a", 2.2, seconds=longer)], [run("a", 2.0, seconds=measured)])
    assert row.excess("wait") == pytest.approx(0.1)
    assert row.excess("forward") == 0.0


def test_files_come_back_as_they_were(tmp_path):
    write(tmp_path / "p" / "a.json", expected("a", 1.0))
    write(tmp_path / "m" / "a.json", run("a", 1.0))
    assert read_predicted(tmp_path / "p") == [expected("a", 1.0)]
    assert read_measured(tmp_path / "m") == [run("a", 1.0)]
    assert json.loads((tmp_path / "m" / "a.json").read_text())["steps_s"] == [[1.0], [1.0]]


def page(predictions, runs) -> str:
    return report(predictions, runs, "a machine", "1 May 2026", "the command")


def test_the_page_has_medians_correlation_and_every_plan():
    predictions = [expected(name, s) for name, s in (("a", 1.0), ("b", 2.2), ("c", 3.6))]
    runs = [run("a", 1.0), run("b", 2.0), run("c", 3.0)]
    text = page(predictions, runs)
    # Errors 0, 10 and 20 %: median 10, 90th percentile 18.
    errors = "10.0% | 18.0% | 20.0% | 1.000 | 10.0% | 18.0% | 20.0% | 20.0% | 11.1% | 11.1% | -"
    assert f"| small | 3 | {errors} |" in text
    assert "1 May 2026; a machine. `the command`" in text
    assert all(f"\n| {name} | 2 |" in text for name in "abc")
    assert "3 of 3 predicted plans were run" in text and "written before its first run." in text


def test_the_page_owns_up_to_predictions_made_after_a_run():
    late = expected("a", 1.0, made_at="2026-11-21T10:06:00+00:00")
    assert "NOT before the first run of small" in page([late], [run("a", 1.0)])


def test_the_page_says_how_many_plans_were_not_run():
    text = page([expected("a", 1.0), expected("b", 1.0)], [run("a", 1.0)])
    assert "1 of 2 predicted plans were run" in text


def test_a_folder_without_runs_is_refused():
    with pytest.raises(SystemExit, match="no run"):
        page([expected("a", 1.0)], [])


def test_seconds_of_a_step_are_told_apart():
    record = StepRecord(start=0.0, started_s=0.0, kind="timed", step_s=10.0)
    forward, backward = Action(0, Work.FORWARD, 0), Action(0, Work.BACKWARD, 0)
    record.sections = [
        Section(forward, 0.0, 4.0), Section(backward, 4.0, 8.0), Section("schedule", 0.0, 8.0),
        Section("gradients", 8.0, 9.0), Section("optimizer", 9.0, 9.5),
        Section("loss", 9.5, 9.75),
    ]  # fmt: skip
    what = What("gradients", 0, "dp", "all_reduce", 4, 2)
    record.waits = [Passed(1, None, 4, 4.0, 5.0)]
    # The first collective goes on from 5 to 8.5, and the rank stands in it from 8 on.
    record.collectives = [Collected(3, what, 5.0, 8.0, 8.5), Collected(0, what, 1.0, 1.0, 2.0)]
    assert by_kind(record) == pytest.approx({
        "forward": 3.0, "backward": 3.0, "collectives": 1.5, "wait": 1.25, "optimizer": 0.5,
        "rest": 0.75,
    })  # fmt: skip


def test_plans_of_both_sizes_are_chosen_and_the_plain_ones_always():
    found = apart({sketch: 1.0 for sketch in POOL})
    assert [s.num_ranks for s in found] == [2] * ON_TWO + [4] * ON_FOUR
    assert set(ALWAYS) <= set(found)


def test_chosen_plans_are_those_whose_predictions_differ_most():
    others = [sketch for sketch in TWO if sketch not in ALWAYS]
    steps_s = {sketch: 1.0 for sketch in POOL} | {others[3]: 2.0, others[5]: 2.01, others[7]: 1.5}
    found = apart(steps_s, 6)  # 4 on two processes, of which three are plain
    assert set(found) == {*ALWAYS, others[5]} and len(found) == 6
    found = apart(steps_s, 8)
    assert {others[5], others[7]} <= set(found) and others[3] not in found


def test_names_tell_all_sketches_apart():
    assert len({sketch.name for sketch in (*TWO, *FOUR)}) == len(TWO) + len(FOUR)


def test_plans_are_what_their_sketches_say():
    subject = SUBJECTS["vgg"]
    graph = subject.graph()
    for sketch in POOL[::2]:
        cluster = Cluster.local(sketch.num_ranks)
        problem = make_problem(graph, cluster, precision="fp32", optimizer="adamw")
        plan = plan_of(problem, sketch)
        check(plan, graph, cluster)
        assert plan.world_size == sketch.num_ranks
        assert plan.num_microbatches == sketch.num_microbatches
        assert {stage.zero for stage in plan.stages} == {sketch.zero}
        assert {stage.model_size for stage in plan.stages} == {sketch.tp}
