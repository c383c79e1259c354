"""The page of the layers, drawn from the imports of the product."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NAMES = ("ir", "forms", "costmodel", "planner", "codegen", "runtime")
LAYERS = {name: (ROOT / "meshwright" / name).resolve() for name in _NAMES}
"""By the name after `meshwright.`, in the order in which they may import each other."""
FACADE = "facade"
_FOLDERS_OF_FACADE = tuple(sorted({*LAYERS} - {"forms"}))


def layers_page() -> str:
    """Returns the page: a drawing of which layer imports which, then all folders."""
    arrows = {
        (layer, to)
        for layer, path in _files()
        for to in map(_layer, _imported(path))
        if to != layer
    }
    lines = [
        "# Layers",
        "",
        "Made by `python -m docs.generate` from the imports in the code. An arrow goes from a",
        "layer to one that it imports; `tests/test_layers.py` allows no others.",
        "",
        "```mermaid",
        "flowchart BT",
        *(f"  {a} --> {b}" for a, b in sorted(arrows)),
        "```",
        "",
        "## Folders",
        "",
        "| folder | what it is |",
        "|---|---|",
        *_folders(),
    ]
    return "\n".join(lines) + "\n"


def _files() -> Iterator[tuple[str, Path]]:
    """Every file of the product, with its layer."""
    for layer, folder in LAYERS.items():
        for path in sorted(folder.rglob("*.py")):
            yield layer, path
    for path in sorted((ROOT / "meshwright").rglob("*.py")):
        if path.relative_to(ROOT / "meshwright").parts[0] not in LAYERS:
            yield FACADE, path


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("meshwright")
        ):
            if node.module == "meshwright":
                yield from (f"meshwright.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def _layer(module: str) -> str:
    name = module.split(".")[1]
    return name if name in LAYERS else FACADE


def _folders() -> Iterator[str]:
    roots = [(layer, path) for layer, path in LAYERS.items() if layer != "forms"]
    for name, root in (*roots, ("meshwright", ROOT / "meshwright")):
        for init in sorted(root.rglob("__init__.py")):
            parts = (name, *init.relative_to(root).parts)
            if parts[0] == "meshwright" and parts[1] in _FOLDERS_OF_FACADE:
                continue  # a link to a layer
            does = (ast.get_docstring(ast.parse(init.read_text())) or "").split("\n\n")[0]
            yield f"| `{'/'.join(parts[:-1])}` | {' '.join(does.split())} |"
