"""Imports go one way: ir, forms, costmodel, planner and forms, codegen, runtime; the facade sees
all."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "ir": set(),
    "forms": {"ir"},
    "costmodel": {"ir", "forms"},
    "planner": {"ir", "forms", "costmodel"},
    "codegen": {"ir", "forms"},
    "runtime": {"ir", "forms", "codegen"},
}


def imported(tree: ast.AST) -> set[str]:
    """Every module that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            # `import_module("meshwright.planner")`, also with a part that is put in later.
            texts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            found |= {x for x in texts if isinstance(x, str) and x.startswith("meshwright.")}
    return found


def violations(folder: str, source: str) -> set[str]:
    """What a file of `folder` imports against the rule."""
    bad = set()
    for module in imported(ast.parse(source)):
        parts = module.split(".")
        if parts[0] in MAY_IMPORT:
            bad.add(f"bare import of {module}")
        elif parts == ["meshwright"]:
            continue  # `from meshwright import x` shows up as meshwright.x too
        elif parts[0] == "meshwright" and parts[1] not in MAY_IMPORT[folder] | {folder}:
            bad.add(module)
    return bad


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    bad = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((ROOT / "meshwright" / folder).resolve().rglob("*.py"))
        for module in violations(folder, path.read_text())
    }
    assert not bad


def test_the_check_catches_what_it_should():
    assert violations("ir", "from meshwright.planner.search.search import search")
    assert violations("runtime", "def f():\n    import meshwright.costmodel.estimate")
    assert violations("forms", "from meshwright.codegen import lower")
    assert violations("ir", 'import_module("meshwright.tools.report.page").write_report(x)')
    assert violations("ir", 'importlib.import_module(f"meshwright.costmodel.{name}")')
    assert not violations("ir", 'import_module(f"meshwright.ir.placed.{name}")')
    assert violations("planner", "from planner import problem")
    assert violations("codegen", "from meshwright import runtime")
    assert not violations("planner", "from meshwright.costmodel.estimate import estimate")


def test_inside_of_blocks_knows_nothing_of_what_is_across_them():
    """The layouts of a block hold wherever it is put: cuts, devices and schedules come after."""
    for path in (ROOT / "meshwright" / "planner" / "inside").glob("*.py"):
        above = {module for module in imported(ast.parse(path.read_text())) if ".across" in module}
        assert not above, path
