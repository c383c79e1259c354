"""A newcomer's way through docs/your_model.md, with what is in the wheel and nothing else."""

import os
import re
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.warm import load, warm

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your_model.md").read_text()
BLOCK = re.compile(
    r"^(?:`(?P<name>\w+\.py)`: .*?\n\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```", re.M | re.S
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install` makes of the wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    # A copy: building leaves files beside the sources.
    subprocess.run(["cp", "-rL", *map(str, _sources()), str(folder)], check=True)
    command = [*pip, "--target", str(folder / "there"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "there"


def _sources():
    names = ("meshwright", "pyproject.toml", "README.md", "LICENSE")
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_the_wheel_has_every_file(installed):
    def files(folder: Path) -> set[str]:
        found = (path for path in _walk(folder) if path.suffix != ".pyc")
        return {str(path.relative_to(folder)) for path in found}

    assert files(installed / "meshwright") == files(ROOT / "meshwright")


def test_a_source_distribution_has_all_tests_and_pages():
    """Of all folders and files of the repository, MANIFEST.in names those beside the package."""
    listed = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    folders = {words[1] for words in listed if words[:1] == ["graft"]}
    patterns = [word for words in listed if words[:1] == ["include"] for word in words[1:]]
    package = {"pyproject.toml", "meshwright"}  # setuptools takes these by itself
    package |= {
        path.resolve().name for path in (ROOT / "meshwright").iterdir() if path.is_symlink()
    }
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no clone")
    for name in {line.split("/")[0] for line in done.stdout.splitlines()} - package:
        known = name in folders or any(fnmatch(name, pattern) for pattern in patterns)
        assert known or name in (".gitignore", "MANIFEST.in", "LICENSE"), name


def _walk(folder: Path):
    for where, _, names in os.walk(folder, followlinks=True):
        yield from (Path(where) / name for name in names)


def test_the_wheel_has_its_command(installed):
    command = [installed / "bin" / "meshwright", "--help"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "search" in done.stdout, done.stderr


def test_every_file_and_command_of_the_page_runs(tmp_path_factory, tmp_path):
    """By forks of this process; by what a newcomer has installed in `make test-all`."""
    load()
    with warm(tmp_path_factory.mktemp("commands")) as environment:
        walk(tmp_path, environment)


@pytest.mark.slow
def test_every_file_and_command_of_the_page_runs_as_printed(installed, tmp_path):
    begun = time.monotonic()
    places = installed / "bin", Path(sys.executable).parent, os.environ["PATH"]
    walk(tmp_path, {**os.environ, "PYTHONPATH": str(installed),
                    "PATH": os.pathsep.join(map(str, places))})  # fmt: skip
    assert time.monotonic() - begun < 600


def walk(folder: Path, environment: dict[str, str]) -> None:
    """Writes and runs what the page has, in its order."""
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    environment.pop("MESHWRIGHT_CHECK", None)
    said = ""
    for block in BLOCK.finditer(PAGE):
        if block["kind"] == "python" and block["name"]:
            (folder / block["name"]).write_text(block["text"])
            continue
        command = "python -" if block["kind"] == "python" else "bash -e"
        done = subprocess.run(
            ["bash", "-c", f"exec {command}"], input=block["text"], cwd=folder, env=environment,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, block["text"] + done.stdout + done.stderr
        said += done.stdout + done.stderr
    assert "step 10: loss" in said and "step 20: loss" in said
    assert said.count("the data ended") == said.count("ended after 20 of 30 steps") == 1
    assert (folder / "plan.html").stat().st_size > 50_000
