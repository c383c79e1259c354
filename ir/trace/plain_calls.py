"""Functions of a model's files that only compute: what they give depends on what they are given,
and they change nothing that is there when they are over.

A round of a loop may call such a function, since it is traced once in the place of all rounds. What
its text does not tell is taken as more than computing. Operators that write into tensors are seen
where the round is traced.
"""

import ast
import builtins
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from meshwright.ir.trace.loops import text_of

NOT_OF_STEPS = frozenset("data detach grad item no_grad numpy requires_grad_ tolist".split())
"""Attributes that hide a gradient or a value."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_PURE = frozenset("abs bool float int isinstance len max min tuple".split())
"""Of Python's own functions, those that only compute."""
_LINES = (ast.Assign, ast.AnnAssign, ast.Expr, ast.If, ast.Pass, ast.Raise, ast.Return)
_OTHERS = (
    ast.Await, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.ListComp, ast.NamedExpr, ast.SetComp,
    ast.Starred, ast.Yield, ast.YieldFrom,
)  # fmt: skip


def is_plain(value: object) -> bool:
    """Tells whether a value is a tensor, or one that nobody can change."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (Tensor, *_PLAIN))


def is_of_outside(value: object) -> bool:
    """Tells whether code that only computes may name something that is there before it: what is
    plain, functions, kinds of things, and torch's modules."""
    return is_plain(value) or is_of_torch(value) or isinstance(value, FunctionType | type)


def is_of_torch(held: object) -> bool:
    """Tells whether something is one of torch's modules of functions."""
    return isinstance(held, ModuleType) and held.__name__.split(".")[0] == "torch"


def only_computes(function: object) -> bool:
    """Tells whether a function, given what is plain, does nothing but compute, by its text; a
    function that asks for itself does not, as the text does not say where that ends."""
    return isinstance(function, FunctionType) and _checked(function, ())


def _checked(function: FunctionType, around: tuple[FunctionType, ...]) -> bool:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if function in around or function.__closure__ or not all(map(is_plain, defaults)):
        return False
    text = text_of(function.__code__)
    if text is None or text.decorator_list or vars(function):
        return False
    called = _called(text)
    if called is None:
        return False
    # What names hold now: other code may have put something else there since the last call.
    held = vars(builtins) | function.__globals__
    for name in called:
        own = held.get(name)
        if isinstance(own, FunctionType):
            if not _checked(own, (*around, function)):
                return False
        elif name not in _PURE or own is not vars(builtins)[name]:
            return False
    others = _outside(text) - called
    roots = _roots(text)
    return all(is_of_torch(held.get(name)) for name in roots) and all(
        is_of_outside(held.get(name)) for name in others
    )


@cache
def _called(text: ast.FunctionDef) -> frozenset[str] | None:
    """Names of the functions that it calls; None if some line or call is of another kind."""
    for line in _lines(text.body):
        targets = line.targets if isinstance(line, ast.Assign) else []
        targets += [line.target] if isinstance(line, ast.AnnAssign) else []
        if not isinstance(line, _LINES) or not all(map(_is_of_names, targets)):
            return None
    found, own = set[str](), _own_names(text)
    for node in _computed(text):
        if isinstance(node, _OTHERS):
            return None
        if isinstance(node, ast.Attribute):
            if node.attr in NOT_OF_STEPS or node.attr.endswith("_"):
                return None
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            if not isinstance(node.func, ast.Name) or node.func.id in own:
                return None
            found.add(node.func.id)
    return frozenset(found)


@cache
def _outside(text: ast.FunctionDef) -> frozenset[str]:
    """Names that it reads and has not made itself."""
    read = (x for x in _computed(text) if isinstance(x, ast.Name))
    return frozenset(x.id for x in read) - _own_names(text)


@cache
def _roots(text: ast.FunctionDef) -> frozenset[str]:
    """Names of the outside whose attributes it calls: `torch` of `torch.exp(x)`."""
    found = set[str]()
    for node in _computed(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root: ast.expr = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name):
                found.add(root.id)
    return frozenset(found) - _own_names(text)


def _computed(text: ast.FunctionDef) -> Iterator[ast.AST]:
    """All expressions of its lines but of those that raise: whoever sees that takes the loop as it
    is."""
    for line in _lines(text.body):
        if not isinstance(line, ast.Raise):
            yield from _expressions(line)


def _lines(body: list[ast.stmt]) -> list[ast.stmt]:
    """Of a function, those inside of its branches among them."""
    found = list[ast.stmt]()
    for line in body:
        found.append(line)
        if isinstance(line, ast.If):
            found += _lines(line.body) + _lines(line.orelse)
    return found


def _expressions(line: ast.stmt) -> list[ast.AST]:
    """All of a line's own: neither of lines inside of it, nor what is said of types."""
    if isinstance(line, ast.If):
        return list(ast.walk(line.test))
    value = getattr(line, "value", None)
    return list(ast.walk(value)) if isinstance(value, ast.AST) else []


def _is_of_names(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(map(_is_of_names, target.elts))
    return isinstance(target, ast.Name)


def _own_names(text: ast.FunctionDef) -> frozenset[str]:
    """Its arguments, and what it assigns."""
    given = [x.arg for x in ast.walk(text.args) if isinstance(x, ast.arg)]
    stored = [
        x.id for x in ast.walk(text) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    ]
    return frozenset((*given, *stored))
