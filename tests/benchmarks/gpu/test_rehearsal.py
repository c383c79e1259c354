"""The whole day at tiny sizes on a CPU: what runs on the GPU has run here before.

Its processes are forks of this one; from a Python of its own it begins in `make test-all`, where it
is seen what it loads.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import seen
from benchmarks.gpu.main import ROOT
from benchmarks.gpu.page import page
from benchmarks.gpu.results import MODULES, load
from benchmarks.gpu.step import load_steps
from tests.benchmarks.gpu.days import day

CARRIED = {"ortools", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
           "immutabledict", "protobuf"}  # fmt: skip
"""What an audit by hand found: the same must follow from what is imported."""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The folder of a rehearsal and its results."""
    out = tmp_path_factory.mktemp("day")
    return out, day(out, fork=True)


def test_all_steps_and_all_their_rows_are_done(rehearsed):
    out, found = rehearsed
    run = load(out)
    assert set(found) == {step.name for step in load_steps()}
    bad = {r.step: (r.status, r.why, r.errors) for r in run.results if not r.sound}
    assert not bad, (out / "log.txt").read_text()[-5000:]
    assert all(result.facts for result in run.results)


def test_claims_find_their_numbers_in_the_facts(rehearsed):
    """On a CPU all that is not of memory of a GPU, NCCL or the preset's own classes of ops."""
    out, _ = rehearsed
    run = load(out)
    text = page(run, load_steps())
    assert text.startswith("# GPUs measured\n\n**A rehearsal at tiny sizes on a CPU")
    lost = [
        claim.text
        for step in load_steps()
        for claim in step.claims
        if claim.measured(run.facts(step.name)) is None
    ]
    only_on_gpus = (
        "allocator",
        "beside its tensors",
        "waits for the device",
        "no test fails",
        "gpt2-medium-graphs:",
        "CUDA graphs make",
    )
    no_such_ops = ("convolution:", "recurrent:", "attention:", "matmul:", "normalization:",
                   "reduction:", "elementwise:", "transcendental:", "gather:", "copy:")  # fmt: skip
    assert not [text for text in lost if not any(word in text for word in only_on_gpus)
                and not text.startswith(no_such_ops)]  # fmt: skip


@pytest.mark.slow
def test_what_has_to_be_carried_follows_from_what_was_imported(tmp_path):
    assert all(one["status"] == "done" for one in day(tmp_path).values())
    assert carried((tmp_path / MODULES).read_text().split()) == CARRIED


def test_what_has_to_be_carried_follows_from_what_steps_name():
    """Also in their functions: a day that begins with all loaded does not show it."""
    code = "import sys; [__import__(name) for name in sys.argv[1:]]; print(*sys.modules)"
    command = [sys.executable, "-c", code, *sorted({*imported(ROOT / "benchmarks" / "gpu")})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert carried(sorted({name.partition(".")[0] for name in done.stdout.split()})) == CARRIED


def imported(folder: Path) -> Iterator[str]:
    """Modules that the files of a folder import, wherever in them."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def carried(modules: list[str]) -> set[str]:
    """Wheels, without versions, that the machine of the day lacks of these modules."""
    pinned = seen.versions((ROOT / "constraints.txt").read_text())
    there = seen.versions((ROOT / "benchmarks" / "gpu" / "there.txt").read_text())
    asked = seen.wanted((ROOT / "pyproject.toml").read_text())
    wheels = seen.lacking(modules, there, pinned, asked)
    return {wheel.partition("==")[0] for wheel in wheels}
