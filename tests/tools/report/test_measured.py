"""A run laid over the prediction."""

from dataclasses import replace

import pytest

from meshwright.ir.errors import MismatchError
from meshwright.ir.plan import plan_io
from meshwright.ir.profile import measured
from meshwright.tools.report.contents import contents
from meshwright.tools.report.page import html, write_report
from meshwright.tools.report.timeline_rows import TICKS
from tests.costmodel.explain.runs import predicted_plan, runs_of
from tests.tools.report.measured_runs import timed_runs, with_kernels


def test_measured_rows_stand_under_the_predicted_ones():
    plan = predicted_plan()
    found = contents(plan, timed_runs(plan))["timeline"]
    scale = found["span_s"] / TICKS
    first, second = (
        [[*row[i : i + 3], row[i + 3] * scale, row[i + 4] * scale] for i in range(0, len(row), 5)]
        for row in found["measured"]
    )
    assert [bar[:3] for bar in first] == [[0, 0, n] for n in range(4)] + [[5, -1, -1]]
    assert first[1][3:] == pytest.approx([0.25, 0.35], abs=1e-6)
    assert second[1][3:] == pytest.approx([0.35, 0.45], abs=1e-6)  # later by its clock


def test_the_comparison_is_that_of_compare():
    plan = predicted_plan()
    found = contents(plan, timed_runs(plan))["measured"]
    assert found["verdict"].startswith("step 1 s predicted, 1.125 s measured: -11.1%, inside")
    assert [kind for _, kind in found["steps"]] == ["warm-up", "timed", "timed", "tracked"]
    assert found["rows"][0]["what"] == "step" and len(found["rows"]) > 10


def test_which_way_kernels_went():
    plan = predicted_plan()
    runs = with_kernels(plan)
    assert contents(plan, timed_runs(plan))["measured"]["kernels"] == []
    assert contents(plan, runs)["measured"]["kernels"] == [
        {"kernel": "route", "way": "torch", "why": "tensors are on <b>cpu</b>",
         "calls": 1500 * len(runs)},
        {"kernel": "swiglu", "way": "triton", "why": "", "calls": 7},
    ]  # fmt: skip


def test_a_run_directory_is_read(tmp_path):
    plan = predicted_plan()
    plan_io.save(plan, tmp_path / "plan.json")
    for run in timed_runs(plan):
        measured.save(run, tmp_path / f"measured_rank{run.rank}.json")
    write_report(plan, tmp_path / "plan.html", tmp_path)
    assert '"verdict":"step 1 s predicted' in (tmp_path / "plan.html").read_text()


def test_a_run_of_another_plan_is_refused():
    plan = predicted_plan()
    with pytest.raises(MismatchError, match="the run is of plan"):
        html(plan_io.rehash(replace(plan, optimizer="sgd")), runs_of(plan))
