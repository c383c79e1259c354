"""Executes notebooks and keeps their outputs: `python notebooks/run.py [NAME ...]`."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
NOTEBOOKS = tuple(sorted(FOLDER.glob("[0-9]_*.ipynb")))
SETTINGS = {
    "COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore:IProgress",  # tqdm, where ipywidgets is missing
}  # fmt: skip
TIMEOUT_S = 400


def executed(path: Path, instead: Mapping[str, str] = MappingProxyType({})) -> NotebookNode:
    """The notebook with new outputs, run in a folder of its own; an error in it is raised.

    `instead`: what stands in its code, and what is run in its place (`{"n_layer=8": "n_layer=2"}`).
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for text, other in instead.items():
            cell.source = cell.source.replace(text, other)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDER / "pictures", Path(folder) / "pictures")
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False,
            resources={"metadata": {"path": folder}},
        )  # fmt: skip
        client.execute(env=_environment())
    for cell in notebook.cells:
        _tidy(cell)
    return notebook


def _environment() -> dict[str, str]:
    """That of a shell where the virtual environment is active."""
    commands = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return os.environ | SETTINGS | {"PATH": commands}


def _tidy(cell: NotebookNode) -> None:
    """Texts in one piece and without colours; what a picture is called in memory says nothing."""
    cell.metadata = NotebookNode()
    if cell.cell_type == "code":
        cell.outputs = _joined(cell.outputs)
    for output in cell.get("outputs", []):
        if "text/plain" in output.get("data", {}) and "image/png" in output.data:
            output.data["text/plain"] = re.sub(r"^<.*>$", "picture", output.data["text/plain"])


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """A stream comes in pieces."""
    found: list[NotebookNode] = []
    for output in outputs:
        text = output.get("text", "")
        if text and found and found[-1].get("name") == output.name:
            found[-1].text += text
        else:
            found.append(output)
    for output in found:
        if "text" in output:
            plain = re.sub(r"\x1b\[[\d;]*m", "", output.text)
            output.text = "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"
    return found


def main(names: list[str]) -> None:
    known = {path.stem for path in NOTEBOOKS}
    if unknown := set(names) - known:
        sys.exit(f"no notebook {sorted(unknown)}; there are {', '.join(sorted(known))}")
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(executed(path), path)
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
