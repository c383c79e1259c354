"""`meshwright compare` on the files of a run."""

import json

import pytest

from meshwright.ir import measured, plan_io
from tests.costmodel.test_compare import predicted_plan, runs_of
from tests.test_cli import invoke


@pytest.fixture
def run(tmp_path):
    """(plan file, run directory) of a hand-made run."""
    plan = predicted_plan()
    for m in runs_of(plan):
        measured.save(m, tmp_path / f"measured_rank{m.rank}.json")
    plan_io.save(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json", tmp_path


def test_it_prints_the_worst_first_and_a_verdict(run, capsys):
    assert invoke("compare", *map(str, run)) == 0
    out = capsys.readouterr().out
    assert out.index("-50.0%") < out.index("+25.0%") < out.index("-20.0%")
    assert "-11.1%, inside the stated 20%" in out


def test_json_is_one_object(run, capsys):
    assert invoke("compare", *map(str, run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inside"] is True and found["rows"][0]["what"] == "step"
    assert found["rows"][0]["error"] == pytest.approx(1 / 1.125 - 1)


def test_another_plan_exits_with_5(run, tmp_path, capsys):
    other = tmp_path / "other.json"
    plan_io.save(predicted_plan(step_s=2.0), other)
    assert invoke("compare", str(other), str(run[1])) == 5
    assert "the run is of plan" in capsys.readouterr().err


def test_missing_and_broken_files_are_named(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert invoke("compare", str(run[0]), str(tmp_path / "empty")) == 4
    assert "measured_rank*.json" in capsys.readouterr().err.replace("\n", "")
    (tmp_path / "measured_rank1.json").write_text("{}")
    assert invoke("compare", *map(str, run)) == 4
    assert "measured_rank1.json" in capsys.readouterr().err.replace("\n", "")
