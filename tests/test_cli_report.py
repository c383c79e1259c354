"""`meshwright report`, `explain` and `diff`, run in this process."""

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.cli import app, main
from meshwright.ir.plan import plan_io
from tests.tools.report.plans import piped


def invoke(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(list(arguments)))
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def plan_file(tmp_path):
    plan_io.save(piped(4, 2, 8, 6), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_report_writes_a_page_beside_the_plan(plan_file, capsys):
    assert invoke("report", str(plan_file)) == 0
    assert plan_file.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert "wrote" in capsys.readouterr().out


def test_report_writes_a_trace_and_no_page_unless_asked(plan_file, tmp_path):
    assert invoke("report", str(plan_file), "--trace", str(tmp_path / "t.json")) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert not plan_file.with_suffix(".html").exists()


def test_what_only_a_page_shows_is_never_left_out(plan_file, tmp_path, capsys):
    asked = ("report", str(plan_file), "--trace", str(tmp_path / "t.json"))
    assert invoke(*asked, "--beside", str(plan_file)) == 0
    assert '"same_model":true' in plan_file.with_suffix(".html").read_text().replace(" ", "")
    for option in ("--run", "--profile"):
        assert invoke(*asked, option, str(tmp_path / "none")) == 4, option
    assert "there is no profile" in capsys.readouterr().err


def test_pages_and_traces_from_python(plan_file, tmp_path):
    plan = plan_io.load(plan_file)
    mw.write_report(plan, tmp_path / "own.html")
    mw.write_trace(plan, tmp_path / "own.json")
    assert invoke("report", str(plan_file), "-o", str(tmp_path / "p.html")) == 0
    assert (tmp_path / "own.html").read_bytes() == (tmp_path / "p.html").read_bytes()
    assert json.loads((tmp_path / "own.json").read_text())["otherData"]["plan"] == plan.hash


def test_a_run_directory_that_is_none_is_refused(plan_file, tmp_path, capsys):
    assert invoke("report", str(plan_file), "--run", str(tmp_path)) == 4
    assert "measured_rank" in capsys.readouterr().err


def test_a_plan_without_a_prediction_is_refused(plan_file, capsys):
    plan_io.save(replace(plan_io.load(plan_file), predicted=None), plan_file)
    for command in ("report", "explain"):
        assert invoke(command, str(plan_file)) == 4
        assert "no prediction" in capsys.readouterr().err.replace("\n", " ")


def test_explain_prints_or_gives_data(plan_file, capsys):
    assert invoke("explain", str(plan_file)) == 0
    assert "What binds" in capsys.readouterr().out
    assert invoke("explain", str(plan_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["answers"] == []
    assert invoke("explain", str(plan_file), "--cluster", "local:2") == 2


def test_diff_says_equal_or_what_differs(plan_file, tmp_path, capsys):
    assert invoke("diff", str(plan_file), str(plan_file)) == 0
    assert capsys.readouterr().out.strip() == "the plans are equal"
    other = tmp_path / "other.json"
    plan_io.save(piped(2, 4, 8, 6), other)
    assert invoke("diff", str(plan_file), str(other)) == 0
    assert "-22.2%" in capsys.readouterr().out
    assert invoke("diff", str(plan_file), str(other), "--json") == 0
    assert json.loads(capsys.readouterr().out)["equal"] is False
