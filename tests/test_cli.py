"""The command line, run in this process: what it prints, writes and exits with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import app, main
from meshwright.ir import plan_io

ROOT = Path(__file__).parent.parent
GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)
SEARCH = ("search", GPT2, "--cluster", "local:2", "--global-batch", "4", "--precision", "fp32")


def invoke(*arguments: str) -> int:
    """The exit code of `meshwright ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main(lambda: app(list(arguments)))
    code = ended.value.code
    return code if isinstance(code, int) else 0


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
    assert invoke("verify", str(plan_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_verify_against_model_and_cluster(plan_file, capsys):
    assert invoke("verify", str(plan_file), "--model", GPT2, "--cluster", "local:2") == 0
    assert invoke("verify", str(plan_file), "--model", GPT2.replace('": 2,', '": 4,', 1)) == 4
    capsys.readouterr()
    assert invoke("verify", str(plan_file), "--cluster", "local:4") == 0
    assert "warning: cluster" in capsys.readouterr().out


def test_editing_by_hand_needs_rehash(plan_file, tmp_path, capsys):
    edited = tmp_path / "edited.json"
    edited.write_text(plan_file.read_text().replace('"zero": 1', '"zero": 2', 1)
                      .replace('"zero": 0', '"zero": 2', 1))  # fmt: skip
    assert invoke("verify", str(edited)) == 4
    assert "--rehash" in capsys.readouterr().err.replace("\n", " ")
    assert invoke("verify", str(edited), "--rehash") == 0
    assert invoke("verify", str(edited)) == 0
    assert plan_io.load(edited).stages[0].zero == 2


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
    ],
)
def test_bad_input_exits_with_its_code_and_says_what_is_legal(arguments, code, words, capsys):
    assert invoke(*arguments) == code
    assert words in capsys.readouterr().err.replace("\n", "")


def test_the_schema_in_the_docs_is_current(capsys):
    assert invoke("schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((ROOT / "docs" / "plan.schema.json").read_text())


def test_run_starts_its_ranks_and_records_their_steps(plan_file, tmp_path):
    command = [sys.executable, "-m", "meshwright", "run", str(plan_file), GPT2]
    command += ["--steps", "2", "-o", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = (tmp_path / f"steps_rank{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1]
    assert done.stdout.count('"loss"') == 2


def test_a_truncated_plan_is_refused(plan_file, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text(plan_file.read_text()[:500])
    assert invoke("show", str(broken)) == 4
