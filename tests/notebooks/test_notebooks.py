"""Every notebook runs, small here and whole in `make test-all`; the outputs that the repository
keeps are whole and clean."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

from notebooks.run import FOLDER, NOTEBOOKS, executed
from tests.warm import load, warm

MOST_BYTES = 500_000
MACHINE = re.compile(r"/(?:home|root|tmp|work|opt|usr|Users)/|[A-Z]:\\")
TROUBLE = re.compile(r"Traceback|\w+Warning\b|\bWARNING\b")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def texts(notebook):
    """All that a reader sees beside pictures."""
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield output.get("data", {}).get("text/plain", "")


def test_there_are_six():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n}_" for n in range(1, 7)]


SMALL = {
    "1": {"n_embd=1600, n_layer=48, n_head=25": "n_embd=64, n_layer=2, n_head=4, vocab_size=256",
          "devices_per_node=4": "devices_per_node=2"},
    "2": {'"n_embd": 1024, "n_layer": 12, "n_head": 16': '"n_embd": 64, "n_layer": 4, "n_head": 4',
          "vocab_size=8192": "vocab_size=256"},
    "3": {"n_embd=512": "n_embd=64", "n_positions=512": "n_positions=32",
          "piped(name, 16)": "plan"},
    "4": {"n_embd=192": "n_embd=32", "n_positions=128": "n_positions=16", "n_layer=4": "n_layer=2",
          "--minutes 0.5": "--minutes 0.01", "--steps 12": "--steps 4"},
    "5": {"n_embd=512": "n_embd=64", "n_layer=8": "n_layer=2", "n_positions=512": "n_positions=32",
          "time_limit_s=300": "time_limit_s=60"},
    "6": {"n_embd=1024": "n_embd=64", "n_layer=16": "n_layer=2",
          "vocab_size=32768": "vocab_size=256", "devices_per_node=4": "devices_per_node=2"},
}  # fmt: skip
"""What stands in a notebook, and what has it run in seconds."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """An environment whose commands need not load torch, and its Python."""
    load()
    folder = tmp_path_factory.mktemp("commands")
    with warm(folder) as environment:
        yield environment, str(folder / "python")


@pytest.mark.sampled
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_at_a_small_size(path: Path, commands, monkeypatch):
    """Every cell and command, by the same kernel; its process and those of commands are forks."""
    environment, python = commands
    instead = SMALL[path.stem[0]]
    code = "\n".join(cell.source for cell in code_cells(nbformat.read(path, as_version=4)))
    if 'os.environ["MESHWRIGHT_' not in code:  # read when meshwright is loaded, which forks have
        monkeypatch.setenv("PATH", environment["PATH"])
        monkeypatch.setattr(sys, "executable", python)  # from here, kernels are started by it
    assert not [text for text in instead if text not in code]
    check(path, executed(path, instead))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path):
    check(path, executed(path, {"--minutes 0.5": "--minutes 0.1"}))


def check(path: Path, new: nbformat.NotebookNode) -> None:
    """Holds what was made anew, and what is kept, against what a reader should see."""
    kept = nbformat.read(path, as_version=4)
    for notebook in (kept, new):
        nbformat.validate(notebook)
        check_outputs(notebook)
    assert len(pictures(kept)) == len(pictures(new)) >= 2


def check_outputs(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    for text in texts(notebook):
        assert not MACHINE.search(text) and not TROUBLE.search(text), text
        assert "\x1b" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_whole(path: Path):
    """Every cell was executed in order, in a file that is quick to load."""
    kept = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in code_cells(kept)]
    assert counts == list(range(1, len(counts) + 1))
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path):
    for text in texts(nbformat.read(path, as_version=4)):
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)\)", text):
            assert (FOLDER / link).exists(), link
