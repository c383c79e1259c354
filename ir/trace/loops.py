"""Loops of a model's files that a trace would unroll, seen when they ask for their `range`.

Inside `seen_loops`, a `for` over a `range` in a file of the model's layers is shown, before it
begins, to somebody who may do it with few operators. When that is done nothing is left to go over.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch import nn

_RANGE = "range"


@dataclass(frozen=True, slots=True)
class SeenLoop:
    """A `for` statement whose body is about to run for the first time."""

    statement: ast.For
    function: ast.FunctionDef
    """The one that it is in."""
    over: range
    values: Mapping[str, Any]
    """Local names of the function, as they are now."""
    names: Mapping[str, Any]
    """Global names of its file."""
    code: CodeType


Do = Callable[[SeenLoop], bool]
"""Does all of a loop and says so, or does nothing."""


@contextmanager
def seen_loops(model: nn.Module, do: Do) -> Iterator[None]:
    """Inside, loops in the files of the model's layers are shown to `do`."""
    files = [file for file in _files(model) if _RANGE not in vars(file) and _only_called(file)]
    try:
        for file in files:
            setattr(file, _RANGE, _asked_by(do))
        yield
    finally:
        for file in files:
            delattr(file, _RANGE)


def _files(model: nn.Module) -> list[ModuleType]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds if "forward" in vars(kind)}
    own = (name for name in sorted(names) if name.split(".")[0] != "torch")
    return [sys.modules[name] for name in own if name in sys.modules]


def _asked_by(do: Do) -> Callable[..., range]:
    def asked(*args: Any) -> range:
        over = range(*args)
        if len(over) > 1 and (loop := _loop(sys._getframe(1), over)) and do(loop):
            return over[:0]
        return over

    return asked


def _loop(frame: FrameType, over: range) -> SeenLoop | None:
    """The loop that a call of `range` in `frame` is for, if the file tells."""
    found = _loops_of(frame.f_code.co_filename).get(frame.f_lineno)
    # The file may have been changed since it was imported.
    if found is None or found[2] != frame.f_code:
        return None
    return SeenLoop(found[0], found[1], over, frame.f_locals, frame.f_globals, frame.f_code)


_Found = tuple[ast.For, ast.FunctionDef, CodeType]


@cache
def _loops_of(path: str) -> Mapping[int, _Found]:
    """Line of a file -> the only loop over a `range` there, its function, and that as compiled."""
    tree = _tree(path)
    if tree is None:
        return {}
    codes = {(x.co_name, x.co_firstlineno): x for x in _codes(compile(tree, path, "exec"))}
    calls = [x.lineno for x in ast.walk(tree) if isinstance(x, ast.Call) and _is_range(x.func)]
    found = dict[int, _Found]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            first = min([function.lineno, *(x.lineno for x in function.decorator_list)])
            code = codes.get((function.name, first))
            for loop in _of_function(function):
                line = loop.iter.lineno
                if code and calls.count(line) == 1 and isinstance(loop.iter, ast.Call):
                    found[line] = loop, function, code
    return found


@cache
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, SyntaxError, ValueError):
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _of_function(node: ast.AST) -> Iterator[ast.For]:
    """Loops over a `range` of one function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.For) and isinstance(child.iter, ast.Call):
            if _is_range(child.iter.func):
                yield child
        yield from _of_function(child)


def _is_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == _RANGE


def _only_called(file: ModuleType) -> bool:
    """Whether a file has loops over a `range`, and does nothing with that name but call it."""
    path = getattr(file, "__file__", None)
    tree = _tree(path) if path and path.endswith(".py") else None
    if tree is None or not _loops_of(str(path)):
        return False
    called = {id(x.func) for x in ast.walk(tree) if isinstance(x, ast.Call)}
    return all(id(x) in called for x in ast.walk(tree) if _is_range(x))
