"""Loops of a model's files that a trace would unroll, seen when they ask for their `range`.

Inside `seen_loops`, a `for` over a `range` in a file of the model's layers is shown, before it
begins, to somebody who may do it with few operators. What is done so is not gone over.
"""

import ast
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch import nn

_RANGE = "range"
_COPIED_LOCALS = sys.version_info < (3, 13)


@dataclass(frozen=True, slots=True)
class SeenLoop:
    """A `for` statement whose body is about to run for the first time."""

    statement: ast.For
    function: ast.FunctionDef
    """The one that it is in."""
    over: range
    frame: FrameType

    @property
    def values(self) -> Mapping[str, Any]:
        """Local names of the function, as they are now."""
        return self.frame.f_locals

    @property
    def names(self) -> Mapping[str, Any]:
        """Global names of its file."""
        return self.frame.f_globals

    @property
    def code(self) -> CodeType:
        return self.frame.f_code

    def assign(self, values: Mapping[str, Any]) -> None:
        """Give local names of the function other values, as its own lines would."""
        self.frame.f_locals.update(values)
        if _COPIED_LOCALS:  # before Python 3.13 what `f_locals` gives is a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.frame), ctypes.c_int(0))

    def read_after(self, names: set[str]) -> set[str]:
        """Those of the names that the function may read, as the loop leaves them, when it is over;
        and all that functions inside of it share."""
        return {n for n in names if self.is_shared(n) or _is_read(n, self.statement, self.function)}

    def rest(self) -> list[ast.stmt]:
        """Returns the statements of the function that may run when the loop is over, in order."""
        return list(_after(self.statement, self.function))

    def is_shared(self, name: str) -> bool:
        """Whether functions inside of this one, or around it, have the name, too."""
        return name in self.code.co_cellvars or name in self.code.co_freevars


Do = Callable[[SeenLoop], int]
"""Does rounds of a loop from the first on, and says how many; or does nothing."""


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
    tracing = threading.get_ident()

    def asked(*args: Any) -> range:
        over = range(*args)
        if threading.get_ident() != tracing:  # another thread may run the same file
            return over
        if len(over) > 1 and (loop := _loop(sys._getframe(1), over)):
            return over[do(loop) :]
        return over

    return asked


def _loop(frame: FrameType, over: range) -> SeenLoop | None:
    """The loop that a call of `range` in `frame` is for, if the file tells."""
    found = _loops_of(frame.f_code.co_filename).get(frame.f_lineno)
    # The file may have been changed since it was imported.
    if found is None or found[2] != frame.f_code:
        return None
    return SeenLoop(found[0], found[1], over, frame)


def text_of(code: CodeType) -> ast.FunctionDef | None:
    """Returns the text of a function from its file; None if that tells no such function, or has
    been changed since it was imported."""
    return _functions_of(code.co_filename).get(code)


@cache
def _functions_of(path: str) -> Mapping[CodeType, ast.FunctionDef]:
    """Functions of a file, as they are compiled -> their text."""
    tree = _tree(path)
    if tree is None:
        return {}
    codes = {(x.co_name, x.co_firstlineno): x for x in _codes(compile(tree, path, "exec"))}
    found = dict[CodeType, ast.FunctionDef]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            first = min([function.lineno, *(x.lineno for x in function.decorator_list)])
            if code := codes.get((function.name, first)):
                found[code] = function
    return found


_Found = tuple[ast.For, ast.FunctionDef, CodeType]


@cache
def _loops_of(path: str) -> Mapping[int, _Found]:
    """Line of a file -> the only loop over a `range` there, its function, and that as compiled."""
    tree = _tree(path)
    if tree is None:
        return {}
    calls = [x.lineno for x in ast.walk(tree) if isinstance(x, ast.Call) and _is_range(x.func)]
    found = dict[int, _Found]()
    for code, function in _functions_of(path).items():
        for loop in _of_function(function):
            line = loop.iter.lineno
            if calls.count(line) == 1 and isinstance(loop.iter, ast.Call):
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


def _is_read(name: str, loop: ast.For, function: ast.FunctionDef) -> bool:
    """Whether a name is read after a loop before it has another value, as far as the text tells."""
    for later in _after(loop, function):
        if isinstance(later, ast.For) and _binds(later.target, name):
            if not _reads(later.iter, name):
                continue  # its own number; after no round at all it would be the old one
        if isinstance(later, ast.Assign) and not _reads(later.value, name):
            if any(_binds(target, name) for target in later.targets):
                return False
        if _reads(later, name):
            return True
    return False


def _after(loop: ast.For, function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Statements that may run after a loop, the next ones first; of loops around it, all."""

    def find(node: ast.AST) -> list[ast.stmt] | None:
        for name, block in ast.iter_fields(node):
            if not isinstance(block, list):
                continue
            for at, child in enumerate(block):
                if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                    continue
                inner = [] if child is loop else find(child)
                if inner is not None:
                    again = isinstance(node, ast.For | ast.While) and name == "body"
                    test = [ast.Expr(node.test)] if isinstance(node, ast.While) else []
                    return inner + block[at + 1 :] + (test + block[:at] if again else [])
        return None

    yield from find(function) or []


def _reads(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(x, ast.Name) and x.id == name and not isinstance(x.ctx, ast.Store)
        for x in ast.walk(node)
    )


def _binds(target: ast.AST, name: str) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return any(isinstance(x, ast.Name) and x.id == name for x in parts)


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
