"""Every notebook runs, and the outputs that the repository keeps are whole and clean."""

import re
from pathlib import Path

import nbformat
import pytest

from notebooks.run import FOLDER, NOTEBOOKS, executed

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


@pytest.mark.sampled
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path):
    kept, new = nbformat.read(path, as_version=4), executed(path, minutes="0.1")
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
