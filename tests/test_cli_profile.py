"""`meshwright profile` and `meshwright search --profile` from a shell."""

import json
from pathlib import Path

import pytest

from meshwright.ir.profile.profile_store import load_profile
from tests.command_line import invoke
from tests.warm import shell

TARGET = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}'
)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("cli") / "p.db"
    done = shell(
        "meshwright", "profile", "-o", str(path), "--model", TARGET, "-c", "local:2", "-m", "0.2",
        "-b", "4", "--precision", "fp32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_profile_writes_and_shows(profiled: tuple[Path, str]) -> None:
    path, printed = profiled
    found = load_profile(path)
    assert found.blocks and found.collectives and "process" in found.memory
    assert "transformer.h" in printed and f"{len(found.blocks)} blocks" in " ".join(printed.split())
    assert found.fingerprint in printed


def test_search_takes_it(profiled: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = profiled
    plan_file = tmp_path / "plan.json"
    asked = ("search", TARGET, "-c", "local:2", "-b", "4", "--precision", "fp32", "--json")
    assert invoke(*asked, "--profile", str(path), "-o", str(plan_file)) == 0
    plan = json.loads(plan_file.read_text())
    assert plan["profile"]["fingerprint"] == load_profile(path).fingerprint
    assert plan["predicted"]["source"] != "assumption"


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (("profile", "-c", "a100-40:1x2", "-o", "p.db"), "this machine has none"),
        (("search", TARGET, "-c", "local:2", "--profile", "none.db"), "there is no profile"),
        (("profile", "-m", "-1", "-o", "p.db"), "must be positive"),
    ],
)
def test_refused(
    command: tuple[str, ...], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / part) if part.endswith(".db") else part for part in command]
    assert invoke(*given) == 4
    said = capsys.readouterr().err
    assert word in " ".join(said.split()) and "Traceback" not in said
