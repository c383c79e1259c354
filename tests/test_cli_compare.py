"""`meshwright compare` on the files of a run."""

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.explain.compare import Expected
from meshwright.costmodel.explain.expected import block_uses, expected_in_detail
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile import measured
from meshwright.ir.profile.measured import ActionMeasured, KernelMeasured, Measured, StepMeasured
from meshwright.ir.profile.profile_store import load_profile, open_store
from meshwright.tools.repredict import Details
from tests.command_line import GPT2, SEARCH, invoke
from tests.costmodel.explain.runs import MACHINE, flat, predicted_plan, run_of, runs_of
from tests.costmodel.fit.timings import block


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


def test_it_says_which_way_kernels_went(run, capsys):
    """Calls of all ranks together, those by torch with the reason."""
    for path in run[1].glob("measured_rank*.json"):
        calls = (
            KernelMeasured(kernel="rms_norm", way="triton", calls=5),
            KernelMeasured(kernel="route", way="torch", why="tensors are on cpu", calls=2),
        )
        measured.save(replace(measured.load(path), kernels=calls), path)
    ranks = len(list(run[1].glob("measured_rank*.json")))
    assert invoke("compare", *map(str, run)) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = [tuple(cell.strip() for cell in line[1:-1]) for line in lines if len(line) == 6]
    assert ("rms_norm", "triton", "", str(5 * ranks)) in rows
    assert ("route", "torch", "tensors are on cpu", str(2 * ranks)) in rows
    assert invoke("compare", *map(str, run), "--json") == 0
    assert json.loads(capsys.readouterr().out)["kernels"][1]["calls"] == 2 * ranks


def test_another_plan_exits_with_5(run, tmp_path, capsys):
    other = tmp_path / "other.json"
    plan_io.save(replace(predicted_plan(step_s=2.0), max_grad_norm=3.0), other)
    assert invoke("compare", str(other), str(run[1])) == 5
    assert "the run is of plan" in capsys.readouterr().err


def test_missing_and_broken_files_are_named(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert invoke("compare", str(run[0]), str(tmp_path / "empty")) == 4
    assert "measured_rank*.json" in capsys.readouterr().err.replace("\n", "")
    (tmp_path / "measured_rank1.json").write_text("{}")
    assert invoke("compare", *map(str, run)) == 4
    assert "measured_rank1.json" in capsys.readouterr().err.replace("\n", "")


@pytest.fixture(scope="module")
def learnable(tmp_path_factory):
    """(plan file, run directory, profile) of a model whose every action took three times as long
    as the blocks of the profile say."""
    folder = tmp_path_factory.mktemp("learn")
    pins = ("--pin", "pp=2", "--pin", "schedule=gpipe", "--pin", "num_microbatches=2")
    assert invoke(*SEARCH, *pins, "--pin", "recompute=none", "-o", str(folder / "plan.json")) == 0
    plan = plan_io.load(folder / "plan.json")
    details = Details.of(plan, GPT2, "local:2", ())
    tables = CostTables(details.graph, details.cluster, plan.precision)
    keys = {use.key for uses in block_uses(plan, tables).values() for use in uses}
    with open_store(folder / "profile.db") as store:
        store.add(MACHINE, *(block(key, 2e-3) for key in sorted(keys)))
    known = CostTables(
        details.graph, details.cluster, plan.precision,
        profile=load_profile(folder / "profile.db", MACHINE),
    )  # fmt: skip
    expected, _ = expected_in_detail(plan, known, ())
    for rank in range(2):
        measured.save(_run_of(plan, expected, rank), folder / f"measured_rank{rank}.json")
    return folder / "plan.json", folder, folder / "profile.db"


def _run_of(plan: Plan, expected: Expected, rank: int) -> Measured:
    actions = tuple(
        ActionMeasured(
            stage=stage, work=work, count=4, busy=flat(3 * seconds), waiting=flat(0.0),
            blocked=flat(0.0),
        )
        for (stage, work), seconds in expected.actions.items()
        if rank in plan.stages[stage].devices
    )  # fmt: skip
    step = StepMeasured(kind="timed", step_s=3 * expected.step_s, loss=1.0)
    return replace(
        run_of(plan, rank),
        world_size=2,
        actions=actions,
        steps=(step, step),
        collectives=(),
        updated_tensors=0,
    )


def _compared(capsys, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert invoke("compare", *arguments, "--json") == 0
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out[out.index("{") :])
    return found


def _errors(found: dict[str, Any], group: str) -> list[float]:
    return [row["error"] for row in found["rows"] if row["group"] == group]


def test_what_was_learned_makes_the_prediction_better(learnable, capsys):
    plan, folder, profile = map(str, learnable)
    model = ("--model", GPT2, "--cluster", "local:2")
    before = _compared(capsys, plan, folder, *model, "--profile", profile)
    assert _errors(before, "action") == pytest.approx([1 / 3 - 1] * 4)
    fingerprint = load_profile(profile, MACHINE).fingerprint
    learned = _compared(capsys, plan, folder, *model, "--learn", profile)
    assert learned["learned"]["records"] > 2
    after = _compared(capsys, plan, folder, *model, "--profile", profile)
    assert max(map(abs, _errors(after, "action"))) < 0.1
    assert abs(after["rows"][0]["error"]) < abs(before["rows"][0]["error"])
    assert load_profile(profile, MACHINE).fingerprint != fingerprint


def test_learning_needs_the_model_and_a_profile(learnable, tmp_path, capsys):
    plan, folder, profile = map(str, learnable)
    assert invoke("compare", plan, folder, "--learn", profile) == 2
    assert "--model" in capsys.readouterr().err
    missing = str(tmp_path / "none.db")
    model = ("--model", GPT2, "--cluster", "local:2")
    assert invoke("compare", plan, folder, *model, "--learn", missing) == 4
    assert "none.db" in capsys.readouterr().err.replace("\n", "")
