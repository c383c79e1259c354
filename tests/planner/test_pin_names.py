"""What is known of a pin is in its file: who else ask for one by name is listed, with why."""

import ast
from collections.abc import Iterator
from pathlib import Path

from meshwright.planner.pins.known import DECISIONS

ROOT = Path(__file__).parent.parent.parent
ASKS = {"pinned", "allowed", "freed", "pins_of"}
FIELD = "a searcher lists values of a field of `StageChoice`, `Mesh` or `Choice`"
CHANGE = "a change of finished plans that gives them this very field of `Stage`"
BOUND = "what pins leave decides which bound holds"
LEFT = {
    "planner/across/model_space.py": FIELD,
    "planner/across/pinned_meshes.py": FIELD,
    "planner/problem/space.py": FIELD,
    "planner/pins/obey.py": FIELD,
    "planner/across/frame_search.py": "1F1B for tables, unless a schedule is asked for",
    "planner/searchers/ilp.py": FIELD,
    "planner/searchers/pipedream.py": FIELD,
    "planner/finishing/": CHANGE,
    "planner/synthesis/choose.py": CHANGE,
    "planner/bounds/": BOUND,
    "planner/search/evidence.py": BOUND,
    "planner/search/search.py": "the batch grows by whole micro-batches",
    "planner/search/objectives.py": "pins that an optimizer needs, or that end a batch's growth",
    "meshwright/profiling/profiling.py": "blocks are measured compiled too where that is asked for",
    "planner/decisions/": "pins, of themselves and of those that exclude them",
    "planner/problem/saved_modes.py": "modes are names of forms; free where none is pinned",
}
"""Files that ask for a pin by name, and why; all of them are of fields that a plan has."""


def asked_by_name(source: str) -> Iterator[str]:
    """Pins that a source asks for: `pinned(x, "zero")`, `Pin("pp", ..)`, `a.name == "dp"`."""
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = node.args[1:2] if node.func.id in ASKS else []
            given = node.args[:1] if node.func.id == "Pin" else given
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            if any(isinstance(part, ast.Attribute) and part.attr == "name" for part in parts):
                given = [x for part in parts for x in getattr(part, "elts", [part])]
        for part in given:
            if isinstance(part, ast.Constant) and part.value in DECISIONS:
                yield str(part.value)


def test_others_walk_over_decisions() -> None:
    assert list(asked_by_name("pinned(of, 'zero'); Pin('pp', 2)")) == ["zero", "pp"]
    assert list(asked_by_name("item.name in ('sync', 'x')")) == ["sync"]
    assert not list(asked_by_name("pinned(of, name); device.name == 'a100'; f('zero')"))
    folders = ("ir", "costmodel", "planner", "codegen", "runtime", "meshwright")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if any(asked_by_name(path.read_text()))
    }
    assert {name for name in found if not name.startswith(tuple(LEFT))} == set()
    unused = {name for name in LEFT if not any(file.startswith(name) for file in found)}
    assert not unused, f"take these off the list: {unused}"
