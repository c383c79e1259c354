"""Caches of modules: each its own, one per owner, gone with the owner."""

import ast
import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import meshwright
from meshwright.ir.memo import Memo, Memos

ROOT = Path(meshwright.__file__).parent


@dataclass
class Owner:
    memos: Memos = field(default_factory=Memos)


def test_a_module_sees_its_own_part_of_one_owner() -> None:
    ours: Memo[str, int] = Memo()
    theirs: Memo[str, int] = Memo()
    first, second = Owner(), Owner()
    ours.of(first)["a"] = 1
    assert ours.of(first) == {"a": 1}
    assert not ours.of(second) and not theirs.of(first)


def test_what_refers_to_its_owner_goes_with_it() -> None:
    memo: Memo[None, Owner] = Memo()
    owner = Owner()
    memo.of(owner)[None] = owner
    held = weakref.ref(owner)
    del owner
    gc.collect()
    assert held() is None


def sources() -> dict[Path, ast.Module]:
    found = {path.resolve() for folder in ROOT.iterdir() for path in folder.rglob("*.py")}
    return {path: ast.parse(path.read_text()) for path in found if "tests" not in path.parts}


def called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def test_caches_are_private_to_the_modules_that_declare_them() -> None:
    made, declared, trees = 0, dict[str, Path](), sources()
    for path, tree in trees.items():
        made += sum(called(node) == "Memo" for node in ast.walk(tree))
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and node.value and called(node.value) == "Memo":
                assert isinstance(node.target, ast.Name) and node.target.id.startswith("_"), path
                declared[f"{path}:{node.target.id}"] = path
    assert made == len(declared) > 10
    names = {key.rpartition(":")[2] for key in declared}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert names.isdisjoint(name.name for name in node.names), path
            if isinstance(node, ast.Attribute) and node.attr == "_by_memo":
                assert path.name == "memo.py", path
