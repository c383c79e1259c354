"""One name, one meaning: no two classes of the product are called the same."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("meshwright", "ir", "costmodel", "planner", "codegen", "runtime")


def shared(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Class names that several files, or one file twice, give, with those files."""
    found = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def product() -> Iterable[Path]:
    """All but the models and cases that tests and benchmarks share: those are called as others'."""
    for folder in FOLDERS:
        found = sorted((ROOT / folder).rglob("*.py"))
        yield from (path for path in found if "testing" not in path.parts)


def test_a_class_name_means_one_thing():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in product()}
    assert len(sources) > 500
    assert not shared(sources)


def test_the_check_catches_what_it_should():
    assert shared({"a": "class Step: ...", "b": "class Step: ..."}) == {"Step": ["a", "b"]}
    assert shared({"a": "def f():\n    class X: ...\nclass X: ..."})
    assert not shared({"a": "class Step: ...", "b": "class PricedStep: ..."})
