"""Who may import whom of those that are not the product: what several share lies in no test."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def imported(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def uses(folder: str, *, less: str = "-") -> dict[str, frozenset[str]]:
    """File -> what it imports, of a folder less another one."""
    files = [path for path in (ROOT / folder).rglob("*.py") if ROOT / less not in path.parents]
    assert len(files) > 10
    return {str(path.relative_to(ROOT)): imported(path) for path in files}


def test_no_test_imports_another() -> None:
    for file, names in uses("tests").items():
        bad = [n for n in names if n.startswith("tests.") and ".test_" in n]
        assert not bad, f"{file} imports {bad}: what both need goes to a file beside them"


def test_benchmarks_import_no_tests() -> None:
    for file, names in uses("benchmarks").items():
        bad = [name for name in names if name.split(".")[0] == "tests"]
        assert not bad, f"{file} imports {bad}: what both need goes to meshwright/testing"


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    for file, names in uses("tests", less="tests/benchmarks").items():
        bad = [name for name in names if name.split(".")[0] == "benchmarks"]
        assert not bad, f"{file} imports {bad}: it belongs to tests/benchmarks, or its helper here"


def test_the_product_imports_neither() -> None:
    for folder in ("ir", "costmodel", "planner", "codegen", "runtime", "meshwright"):
        for file, names in uses(folder).items():
            assert not [n for n in names if n.split(".")[0] in ("tests", "benchmarks")], file
