"""The command line, run in this process: what it prints, writes and exits with."""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch

import meshwright
from meshwright.arguments.targets import load_target
from meshwright.ir.plan import plan_io
from meshwright.ir.profile import measured
from meshwright.running.launch import step_kinds
from tests.command_line import GPT2, ROOT, SEARCH, invoke
from tests.warm import shell


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "plan.json"
    assert invoke(*SEARCH, "--pin", "dp_shard=2", "-o", str(path)) == 0
    return path


def test_search_writes_a_plan_that_loads_and_prints_it(plan_file, capsys):
    plan = plan_io.load(plan_file)
    assert plan.world_size == 2 and plan.global_batch_size == 4
    assert plan.constraints == ("dp_shard=2",)
    assert invoke("show", str(plan_file)) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out


def test_json_output_is_one_object(plan_file, capsys):
    assert invoke("show", str(plan_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["hash"] == plan_io.load(plan_file).hash
    assert invoke("check", str(plan_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_several_clusters_are_ranked(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    pins = ("--pin", "recompute=none", "--pin", "num_microbatches=1", "--objective", "memory")
    arguments = (*SEARCH, "-c", "local:1", *pins, "-o", str(plan))
    assert invoke(*arguments) == 0
    printed = capsys.readouterr().out
    assert "Clusters by memory" in printed and "local:1" in printed and "local:2" in printed
    assert invoke(*arguments, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["clusters"]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks == sorted(peaks) and len(rows) == 2
    assert plan_io.load(plan).cluster.name == rows[0]["cluster"]


def test_a_command_imports_no_more_than_it_needs(plan_file):
    """Torch takes seconds, and what traces a model one more."""
    ask = (
        "import sys\n"
        "from meshwright.cli import COMMANDS, app\n"
        "app(['--help'], standalone_mode=False)\n"
        "app(['show', sys.argv[1]], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
        "for name in ('check', 'compare', 'diff', 'explain', 'report'):\n"
        "    COMMANDS.load(name)\n"
        "print([name for name in ('torch', 'torch._dynamo', 'ortools') if name in sys.modules])"
    )
    command = [sys.executable, "-c", ask, str(plan_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("['torch']\n")
    assert "Print a plan as tables." in done.stdout  # of the list of commands


def test_a_batch_that_nobody_gave_is_said(tmp_path, capsys):
    assert invoke("search", GPT2, "-c", "local:1", "-o", str(tmp_path / "plan.json")) == 0
    size = plan_io.load(tmp_path / "plan.json").global_batch_size
    assert f"the batch is the example's, {size} samples; -b" in capsys.readouterr().out
    assert invoke("--version") == 0
    assert capsys.readouterr().out == f"meshwright {meshwright.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("search", "nothing", "-c", "local:2"), 4, "module:callable"),
        (("search", "hf:NoConfig", "-c", "local:2"), 4, "NoConfig"),
        (("search", "hf:GPT2Config{oops}", "-c", "local:2"), 4, "settings"),
        (("search", GPT2, "-c", "moon"), 4, "local:4"),
        (("search", GPT2, "-c", "local:2", "-b", "4", "--pin", "tpp=2"), 4, "tp"),
        ((*SEARCH, "--pin", "tp=7"), 3, "tp=7"),
        (("search", GPT2, "-c", "warp-drive:8"), 4, "h100-sxm"),
        (("search", GPT2, "-c", "h100:8"), 4, "nearest is 'h100-sxm'"),
        (("search", GPT2, "-c", "locl:4"), 4, "nearest is 'local'"),
        ((*SEARCH, "--objective", "fastest"), 4, "throughput"),
        ((*SEARCH, "--objective", "cheapest"), 4, "price_per_hour"),
        ((*SEARCH, "--pin", "step<=1ns"), 3, "step<="),
    ],
)
def test_bad_input_exits_with_its_code_and_says_what_is_legal(arguments, code, words, capsys):
    assert invoke(*arguments) == code
    assert words in capsys.readouterr().err.replace("\n", "")


def test_the_schema_in_the_docs_is_current(capsys):
    assert invoke("schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((ROOT / "docs" / "plan.schema.json").read_text())


def test_run_starts_its_ranks_and_leaves_a_run_directory(plan_file, tmp_path, capsys):
    asked = ("--steps", "5", "-o", str(tmp_path / "run"), "--json")
    done = shell("meshwright", "run", str(plan_file), GPT2, *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"loss"') == 5
    kinds = ["warm-up", "timed", "timed", "tracked", "traced"]
    for rank in range(2):
        rows = (tmp_path / "run" / f"steps_rank{rank}.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(5))
        assert [json.loads(row)["kind"] for row in rows] == kinds
        with gzip.open(tmp_path / "run" / f"trace_rank{rank}.json.gz", "rt") as file:
            assert json.load(file)["traceEvents"]
    assert all(m.memory.tensors for m in measured.load_run(tmp_path / "run"))
    assert invoke("compare", str(plan_file), str(tmp_path / "run")) == 0
    assert "predicted" in capsys.readouterr().out


def _wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_killed_run_leaves_no_rank_and_a_whole_run_directory(plan_file, tmp_path):
    """The system asks the ranks for it, which end after their step."""
    folder, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "-m", "meshwright", "run", str(plan_file), GPT2]
    command += ["--steps", "1000000", "-o", str(folder), "--log", "jsonl"]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: log.exists() and log.read_text().count("\n") > 2, 100)
        others = psutil.Process(parent.pid).children(recursive=True)
        assert len(others) == 2
    finally:
        parent.kill()
    parent.wait()
    _wait_for(lambda: not any(p.is_running() for p in others), 40)
    steps = log.read_text().count("\n")
    for rank in range(2):
        rows = (folder / f"steps_rank{rank}.jsonl").read_text().splitlines()
        assert abs(len(rows) - steps) <= 1
    assert len(measured.load_run(folder)) == 2


def test_a_run_directory_keeps_to_one_plan(plan_file, tmp_path, capsys):
    plan = plan_io.load(plan_file)
    other = tmp_path / "other.json"
    plan_io.save(replace(plan, max_grad_norm=3.0), other)
    plan_io.save(plan, tmp_path / "plan.json")
    assert invoke("run", str(other), GPT2, "--steps", "1", "-o", str(tmp_path)) == 4
    assert "holds a run of plan" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("steps", "trace", "kinds"),
    [
        (0, True, []),
        (1, True, ["warm-up"]),
        (2, True, ["warm-up", "timed"]),
        (3, True, ["warm-up", "timed", "tracked"]),
        (4, True, ["warm-up", "timed", "tracked", "traced"]),
        (4, False, ["warm-up", "timed", "timed", "tracked"]),
    ],
)
def test_few_steps_are_rather_timed_than_traced(steps, trace, kinds):
    assert step_kinds(steps, trace=trace) == kinds


def test_a_truncated_plan_is_refused(plan_file, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text(plan_file.read_text()[:500])
    assert invoke("show", str(broken)) == 4
    broken.write_text("import torch\n")
    assert invoke("show", str(broken)) == 4
    assert "is no JSON: it begins with 'import torch" in capsys.readouterr().err


def test_a_target_has_the_same_weights_in_each_process():
    """Whatever has been drawn before: each rank of a job builds its own."""
    first = load_target(GPT2).model.state_dict()
    torch.rand(5)
    again = load_target(GPT2).model.state_dict()
    assert all(torch.equal(first[name], value) for name, value in again.items())
