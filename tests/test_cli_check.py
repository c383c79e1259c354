"""`meshwright check`: what it finds, what it completes, what it writes."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from meshwright.cli import app, main
from meshwright.ir.plan import plan_io
from meshwright.testing.spawn import run_ranks

GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)
ON = ("--model", GPT2, "--cluster", "local:4")
SMALL = {"pp": 2, "dp_shard": 2, "zero": 1, "num_microbatches": 2, "global_batch_size": 8,
         "precision": "fp32", "recompute": "none", "tp": 1, "cp": 1}  # fmt: skip


def invoke(*arguments: str) -> int:
    """The exit code of `meshwright check ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(["check", *arguments]))
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    (folder / "small.json").write_text(json.dumps(SMALL))
    assert invoke(str(folder / "small.json"), *ON, "-o", str(folder / "plan.json")) == 0
    return folder / "plan.json"


def findings(capsys, *arguments: str) -> dict[str, list[str]]:
    """Rule -> messages of `meshwright check --json`."""
    capsys.readouterr()
    invoke(*arguments, "--json")
    found: dict[str, list[str]] = {}
    for row in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(row["rule"], []).append(f"{row['message']}; {row['nearest']}")
    return found


def written(tmp_path, plan, **changes):
    path = tmp_path / "changed.json"
    plan_io.save(replace(plan, **changes), path)
    return str(path)


def test_a_plan_by_hand_is_completed_and_priced(plan_file, capsys):
    plan = plan_io.load(plan_file)
    assert len(plan.stages) == 2 and plan.num_microbatches == 2 and plan.precision == "fp32"
    assert all(s.mesh["dp_shard"] == 2 and s.zero == 1 for s in plan.stages)
    assert plan.predicted and plan.predicted.step_s > 0 and plan.predicted.detail
    assert "pp=2" in plan.constraints
    assert findings(capsys, str(plan_file), *ON) == {}


def test_a_plan_by_hand_needs_a_model_and_a_cluster(tmp_path, capsys):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    assert invoke(str(path)) == 2
    assert "--model" in capsys.readouterr().err
    path.write_text(json.dumps(SMALL))
    assert invoke(str(path), *ON, "--routes", "zipf:none") == 4
    assert "zipf:none" in capsys.readouterr().err
    path.write_text('{"tpp": 2}')
    assert invoke(str(path)) == 4
    assert "nearest is 'tp'" in capsys.readouterr().err


def test_a_plan_by_hand_that_cannot_be_says_what_can(tmp_path, capsys):
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(SMALL | {"dp_shard": 4}))
    assert invoke(str(path), *ON) == 4
    assert "8 devices, the cluster has 4" in capsys.readouterr().err.replace("\n", " ")
    path.write_text(json.dumps(SMALL | {"num_microbatches": 3}))
    assert invoke(str(path), *ON) == 4
    assert "num_microbatches 3; nearest is 2" in capsys.readouterr().err.replace("\n", " ")


def test_a_plan_by_hand_that_is_too_large_is_priced_all_the_same(tmp_path, capsys):
    path = tmp_path / "large.json"
    path.write_text(json.dumps({"pp": 1, "tp": 1, "dp_replicate": 1, "precision": "fp32"}))
    big = 'hf:GPT2Config{"n_embd": 12288, "n_layer": 8, "n_head": 96}'
    assert invoke(str(path), "--model", big, "-c", "t4:1", "-b", "1") == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "error: memory: stage 0 needs" in printed and "Predicted peak memory" in printed


def test_editing_by_hand_needs_rehash(plan_file, tmp_path, capsys):
    edited = tmp_path / "edited.json"
    edited.write_text(plan_file.read_text().replace('"zero": 1', '"zero": 2'))
    assert invoke(str(edited)) == 4
    assert "--rehash" in " ".join(capsys.readouterr().out.split())
    assert invoke(str(edited), "--rehash") == 0
    rehashed = plan_io.load(edited)
    assert rehashed.stages[0].zero == 2
    assert rehashed.predicted is None, "what was predicted was predicted of another plan"
    assert "no prediction" in capsys.readouterr().out
    assert invoke(str(edited), *ON, "-o", str(edited)) == 0
    assert plan_io.load(edited).predicted and "no prediction" not in capsys.readouterr().out


def test_a_file_that_is_no_plan_is_one_finding(plan_file, tmp_path, capsys):
    path = tmp_path / "broken.json"
    path.write_text(plan_file.read_text().replace('"num_microbatches"', '"num_microbatch"'))
    (message,) = findings(capsys, str(path))["schema"]
    assert "nearest is 'num_microbatches'" in message


def test_a_schedule_that_deadlocks_is_found(plan_file, tmp_path, capsys):
    plan = plan_io.load(plan_file)
    rows = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    path = written(tmp_path, plan, schedule=replace(plan.schedule, rows=rows))
    (message,) = findings(capsys, path)["schedule"]
    assert "deadlocks: rank 0 at 0B0, rank 1 at 1F1" in message


def test_divisibility_is_found(plan_file, tmp_path, capsys):
    path = written(tmp_path, plan_io.load(plan_file), num_microbatches=3)
    (message,) = findings(capsys, path)["batch"]
    assert "not a multiple of 3" in message and "2 micro-batches" in message


def test_another_model_or_cluster_is_found(plan_file, capsys):
    other = GPT2.replace('"n_layer": 4', '"n_layer": 6')
    assert "model" in findings(capsys, str(plan_file), "--model", other)
    assert "cluster" in findings(capsys, str(plan_file), "--cluster", "local:5")
    assert invoke(str(plan_file), "--cluster", "local:5") == 0, "a warning"
    assert invoke(str(plan_file), "--cluster", "local:5", "--strict") == 4


def test_stale_estimates_are_found_and_priced_anew(plan_file, tmp_path, capsys):
    plan = plan_io.load(plan_file)
    slower = replace(plan.predicted, step_s=2 * plan.predicted.step_s)
    path = written(tmp_path, plan, predicted=slower, versions={"torch": "1.0", "": "1"})
    found = findings(capsys, path, *ON)["stale"]
    assert "torch 1.0" in found[0] and "-50.0%" in found[1]
    assert invoke(path, *ON, "-o", path) == 0
    assert plan_io.load(path).predicted.step_s == plan.predicted.step_s


def test_json_has_the_plan_and_where_it_went(plan_file, capsys):
    capsys.readouterr()
    assert invoke(str(plan_file), *ON, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["plan"]["global_batch_size"] == 8 and printed["written"] == ""


def _dry_run(rank: int, store: str, path: str) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as printed:
        code = invoke(path, "--model", GPT2, "--dry-run")
    return code, printed.getvalue()


def test_a_dry_run_steps_all_ranks(plan_file, capsys):
    ((code, printed),) = run_ranks(1, _dry_run, str(plan_file), init=False)
    assert code == 0 and "4 ranks of" in printed
    assert invoke(str(plan_file), "--dry-run") == 2
    assert "--model" in capsys.readouterr().err
