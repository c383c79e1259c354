"""Loops over tokens, or over chunks of them, become one operator (`ir.graph.recurrence`).

Found by structure: each round reads its place of some tensors, `x[:, i]`, and what the round before
has left; and leaves something in its place of others, or at the end of a list. What is done again
and again without places is one, too, if it reads nothing else. What a round computes is traced
once, alone. A loop whose rounds are not alike, or name sizes, stays as it is.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.recurrence import RECURRENCE, RecurrentStep, StepCall
from meshwright.ir.torch_private import (
    OpOverload,
    fake_mode,
    no_modes,
    schema_arguments,
    storage_key,
    written_arguments,
)
from meshwright.ir.trace.loops import SeenLoop
from meshwright.ir.trace.stand_ins import standing_in

SHORTEST = 4
"""Rounds from which on a loop is worth it."""
_SIZES = frozenset("repeats sections shape size sizes split_size".split())
_PLACES = frozenset("device layout memory_format pin_memory".split())
_MAY_RAISE: tuple[type[Exception], ...] = (
    RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    AssertionError, NameError,
)  # fmt: skip
_NOT_OF_STEPS = frozenset("data detach grad item no_grad numpy requires_grad_ tolist".split())
"""What hides a gradient or a value."""
_NO_TENSOR = (bool, int, float, str, type(None))


@dataclass(slots=True)
class _LoopRound:
    """What the text of a loop says of a round."""

    number: str
    reads: list[tuple[str, ast.Subscript]] = field(default_factory=list)
    """A tensor, and how the round reads its part of it."""
    writes: dict[str, int] = field(default_factory=dict)
    """A tensor that it writes its part of -> along which dim."""
    lists: list[str] = field(default_factory=list)
    """Those at whose end it puts something."""
    carried: list[str] = field(default_factory=list)
    """Names that it reads as the round before has left them."""
    made: set[str] = field(default_factory=set)
    """All that it assigns."""
    fixed: list[str] = field(default_factory=list)
    """Names of the outside that it reads and does not assign."""
    kinds: dict[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of tensors of the outside that it asks for, by name."""
    lines: list[ast.stmt] = field(default_factory=list)
    """The round, with names in the place of what it reads and leaves."""


class _NotAlike(Exception):
    """A loop is none of ours."""


def run_steps(loop: SeenLoop) -> bool:
    """Do a loop whose rounds are alike with one operator; whether it is one."""
    if len(loop.over) < SHORTEST or loop.over.step != 1 or loop.over.start:
        return False
    try:
        found = _read_text(loop)
        step, states, steps, fixed = _traced_round(loop, found)
    except _NotAlike:
        return False
    dims = [dim for dim, _ in _reads_of(found)] or [0]
    made_dims = [found.writes.get(name, 0) for name in (*found.writes, *found.lists)]
    results = RECURRENCE(states, steps, fixed, dims, made_dims, step.text())
    count = len(states)
    loop.assign({
        found.number: loop.over[-1], **dict(zip(found.carried, results[:count], strict=True))
    })  # fmt: skip
    made = dict(zip((*found.writes, *found.lists), results[count:], strict=True))
    for name in found.writes:
        loop.values[name].copy_(made[name])
    for name in found.lists:
        if not loop.values[name] and _is_only_stacked(name, loop):
            loop.assign({name: Parts(made[name])})
        else:
            loop.values[name].extend(made[name].unbind(0))
    return True


class Parts(list[Tensor]):
    """Stands for a list of the parts of a tensor along its first dim, and is never looked into."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.whole = whole


@contextmanager
def stacking_parts() -> Iterator[None]:
    """Inside, `torch.stack` takes `Parts`, too."""
    usual: Any = torch.stack

    def stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
        if isinstance(tensors, Parts):
            return tensors.whole.movedim(0, dim)
        found: Tensor = usual(tensors, dim, **kwargs)
        return found

    with standing_in(torch, "stack", stack):
        yield


# What the text says -------------------------------------------------------------------------------


def _read_text(loop: SeenLoop) -> _LoopRound:
    statement = loop.statement
    if statement.orelse or not isinstance(statement.target, ast.Name):
        raise _NotAlike
    found = _LoopRound(statement.target.id)
    values = loop.values
    assigned = {name for line in statement.body for name in _assigned(line)}
    for line in statement.body:
        rewrite = _Rewrite(found, assigned, loop)
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            value, target = rewrite.visit(_copy(line.value)), line.targets[0]
        elif isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
            read = ast.BinOp(ast.Name(line.target.id, ast.Load()), line.op, _copy(line.value))
            value, target = rewrite.visit(read), line.target
        elif isinstance(line, ast.Expr) and _appended(line.value):
            call = line.value
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            assert isinstance(call.func.value, ast.Name)
            name = call.func.value.id
            if name in found.lists or not isinstance(values.get(name), list):
                raise _NotAlike
            found.lists.append(name)
            value, target = rewrite.visit(_copy(call.args[0])), ast.Name(_left(name), ast.Store())
        else:
            raise _NotAlike
        if isinstance(target, ast.Subscript):
            name, dim = _written(target, found.number, values)
            if name in found.writes or name in assigned:
                raise _NotAlike
            found.writes[name] = dim
            target = ast.Name(_left(name), ast.Store())
        elif isinstance(target, ast.Name):
            found.made.add(target.id)
        else:
            raise _NotAlike
        found.lines.append(ast.Assign([target], value))
    outside = {*found.fixed, *(name for name, _ in found.reads)}
    left = {*found.writes, *found.lists}
    if outside & left or found.number in found.made or not (left or found.carried):
        raise _NotAlike
    if loop.read_after(found.made - set(found.carried)):
        raise _NotAlike
    return found


def _is_only_stacked(name: str, loop: SeenLoop) -> bool:
    """Whether all that the function does with a list, but for the loop, is to stack it once."""
    inside = set(map(id, ast.walk(loop.statement)))
    outside = [x for x in ast.walk(loop.function) if id(x) not in inside]
    reads = [x for x in outside if isinstance(x, ast.Name) and x.id == name]
    reads = [x for x in reads if not isinstance(x.ctx, ast.Store)]
    stacked = [
        x for x in outside
        if isinstance(x, ast.Call) and ast.unparse(x.func) == "torch.stack"
        and x.args and x.args[0] in reads and len(x.args) <= 2
        and all(keyword.arg == "dim" for keyword in x.keywords)
    ]  # fmt: skip
    return len(reads) == len(stacked) == 1 and not loop.is_shared(name)


def _copy(node: ast.expr) -> ast.expr:
    parsed = ast.parse(ast.unparse(node), mode="eval")
    return parsed.body


def _assigned(line: ast.stmt) -> Iterator[str]:
    targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
    yield from (x.id for x in targets if isinstance(x, ast.Name))


def _appended(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append" and isinstance(node.func.value, ast.Name)
        and len(node.args) == 1 and not node.keywords
    )  # fmt: skip


def _left(name: str) -> str:
    return f"left in {name}"


def _part(number: int) -> str:
    return f"part {number}"


def _written(target: ast.Subscript, number: str, values: Any) -> tuple[str, int]:
    """The tensor that a round writes its part of, whole but for that place."""
    if not isinstance(target.value, ast.Name):
        raise _NotAlike
    index = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    at = [i for i, x in enumerate(index) if isinstance(x, ast.Name) and x.id == number]
    whole = values.get(target.value.id)
    if len(at) != 1 or not isinstance(whole, Tensor) or len(index) > whole.ndim:
        raise _NotAlike
    if not all(_is_all(x) for i, x in enumerate(index) if i != at[0]):
        raise _NotAlike
    return target.value.id, at[0]


def _is_all(index: ast.expr) -> bool:
    return isinstance(index, ast.Slice) and not (index.lower or index.upper or index.step)


def _is_constant(index: ast.expr | None) -> bool:
    """Whether it takes the same part in each round, as the text says: `:`, `-1`, `None`, `2:`."""
    if isinstance(index, ast.Slice):
        return all(map(_is_constant, (index.lower, index.upper, index.step)))
    if isinstance(index, ast.UnaryOp):
        index = index.operand
    return index is None or isinstance(index, ast.Constant)


class _Rewrite(ast.NodeTransformer):
    """Notes what a line reads, with names in the place of its parts of tensors."""

    def __init__(self, found: _LoopRound, assigned: set[str], loop: SeenLoop) -> None:
        self._found, self._assigned = found, assigned
        self._values, self._names = loop.values, loop.names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        tensor = node.value
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = [i for i, x in enumerate(index) if self._is_number(x)]
        outside = isinstance(tensor, ast.Name) and tensor.id not in self._assigned
        if not at or not outside:
            return self.generic_visit(node)
        assert isinstance(tensor, ast.Name)
        whole = self._values.get(tensor.id)
        if len(at) > 1 or not isinstance(whole, Tensor) or at[0] >= whole.ndim:
            raise _NotAlike
        if not all(map(_is_all, index[: at[0]])):
            raise _NotAlike
        if not all(map(_is_constant, index[at[0] + 1 :])):
            raise _NotAlike
        name = ast.Name(_part(len(self._found.reads)), ast.Load())
        self._found.reads.append((tensor.id, node))
        after = [*index[: at[0]], *index[at[0] + 1 :]]
        if all(map(_is_all, after)):
            return name
        return ast.Subscript(name, ast.Tuple(after, ast.Load()), ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "dtype" and isinstance(node.value, ast.Name):
            whole = self._values.get(node.value.id)
            if node.value.id not in self._assigned and isinstance(whole, Tensor):
                name = f"dtype of {node.value.id}"
                self._found.kinds[name] = whole.dtype
                return ast.Name(name, ast.Load())
        if node.attr in _NOT_OF_STEPS or node.attr.endswith("_"):
            raise _NotAlike
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Of tensors and of modules of functions; what else is called may do more than compute."""
        asked = node.func
        if not isinstance(asked, ast.Attribute):
            raise _NotAlike
        while isinstance(asked, ast.Attribute):
            asked = asked.value
        if isinstance(asked, ast.Name) and asked.id not in self._assigned:
            held = self._values.get(asked.id, self._names.get(asked.id))
            if not isinstance(held, Tensor) and not _is_of_torch(held):
                raise _NotAlike
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        found, name = self._found, node.id
        if name == found.number:
            raise _NotAlike
        if name in self._assigned:
            if name not in found.made and name not in found.carried:
                found.carried.append(name)
        elif name in self._values and name not in found.fixed:
            found.fixed.append(name)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Lambda | ast.comprehension | ast.NamedExpr | ast.Await | ast.Yield):
            raise _NotAlike
        return super().generic_visit(node)

    def _is_number(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self._found.number


def _is_of_torch(held: object) -> bool:
    return isinstance(held, ModuleType) and held.__name__.split(".")[0] == "torch"


def _reads_of(found: _LoopRound) -> list[tuple[int, str]]:
    """The dims that parts are taken along, and the tensors that they are of."""
    places = []
    for name, node in found.reads:
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = next(i for i, x in enumerate(index)
                  if isinstance(x, ast.Name) and x.id == found.number)  # fmt: skip
        places.append((at, name))
    return places


# What a round computes ----------------------------------------------------------------------------

_Inputs = tuple[RecurrentStep, list[Tensor], list[Tensor], list[Tensor]]


def _traced_round(loop: SeenLoop, found: _LoopRound) -> _Inputs:
    """The step, and the tensors that it begins with, goes along and has throughout."""
    values, length = loop.values, len(loop.over)
    states = [x for x in map(values.get, found.carried) if isinstance(x, Tensor)]
    steps = [values[name] for _, name in _reads_of(found)]
    fixed = [name for name in found.fixed if isinstance(values[name], Tensor)]
    if len(states) < len(found.carried) or not (steps or states) or (fixed and not steps):
        raise _NotAlike
    if any(x.shape[dim] != length for x, (dim, _) in zip(steps, _reads_of(found), strict=True)):
        raise _NotAlike
    if any(values[name].shape[dim] != length for name, dim in found.writes.items()):
        raise _NotAlike
    if not steps:  # the same again and again; its places say how often
        steps = [torch.zeros(length, dtype=states[0].dtype)]
    names = [
        *found.carried, *(_part(i) for i in range(len(steps))), *fixed
    ]  # fmt: skip
    results = [*found.carried, *(_left(name) for name in (*found.writes, *found.lists))]
    along = [dim for dim, _ in _reads_of(found)] or [0]
    parts = [x.select(dim, 0) for x, dim in zip(steps, along, strict=True)]
    others = found.kinds | {n: values[n] for n in found.fixed if n not in fixed}
    run = _as_function(loop, found, names, results, others)
    likes = [(tuple(x.shape), x.dtype) for x in (*states, *parts, *(values[n] for n in fixed))]
    count, kinds = len(states), [x.dtype for x in states]
    for _ in range(2):
        step, made = _traced(run, likes)
        if any(like[0] != shape for like, (shape, _) in zip(likes[:count], made, strict=False)):
            raise _NotAlike
        after = [dtype for _, dtype in made[:count]]
        if after == [dtype for _, dtype in likes[:count]]:
            break
        # What is zero at first may be in a narrower type than what is added to it.
        if any(torch.promote_types(a, b) != b for a, b in zip(kinds, after, strict=True)):
            raise _NotAlike
        likes[:count] = made[:count]
    else:
        raise _NotAlike
    _check_left(found, values, made[count:])
    _check_apart([values[n] for n in found.writes], [*states, *steps, *(values[n] for n in fixed)])
    begun = [
        x if x.dtype == dtype else x.to(dtype)
        for x, (_, dtype) in zip(states, likes[:count], strict=True)
    ]
    return step, begun, steps, [values[name] for name in fixed]


def _check_left(
    found: _LoopRound, values: Any, made: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """What a round leaves in its place has that place's size: nothing is broadcast."""
    for (name, dim), (shape, _) in zip(found.writes.items(), made, strict=False):
        whole = tuple(values[name].shape)
        if (*whole[:dim], *whole[dim + 1 :]) != shape:
            raise _NotAlike


def _check_apart(written: list[Tensor], read: list[Tensor]) -> None:
    """What is written shares no memory with what is read, or with one another."""
    keys = [storage_key(x) for x in written]
    if len({*keys}) < len(keys) or {*keys} & {storage_key(x) for x in read}:
        raise _NotAlike


def _as_function(
    loop: SeenLoop, found: _LoopRound, names: list[str], results: list[str], others: dict[str, Any]
) -> Any:
    body = ast.fix_missing_locations(ast.Module(list(found.lines), []))
    code = compile(body, loop.code.co_filename, "exec")

    def run(*tensors: Tensor) -> list[Tensor]:
        local = {**others, **dict(zip(names, tensors, strict=True))}
        exec(code, dict(loop.names), local)
        return [local[name] for name in results]

    return run


_Likes = list[tuple[tuple[int, ...], torch.dtype]]


def _traced(run: Any, likes: _Likes) -> tuple[RecurrentStep, _Likes]:
    """The round as data, on tensors like these, and what its results are like."""
    with no_modes(), torch.device("cpu"), torch.no_grad(), fake_mode():
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in likes]
        try:
            module = make_fx(run, pre_dispatch=True)(*given)
        except _MAY_RAISE as error:  # if it is the model's own fault, the loop raises it again
            raise _NotAlike from error
    return _as_data(list(module.graph.nodes), [dtype for _, dtype in likes])


def _as_data(nodes: list[Node], dtypes: list[torch.dtype]) -> tuple[RecurrentStep, _Likes]:
    numbers = dict[Node, str]()
    calls = list[StepCall]()
    for node in nodes:
        if node.op == "placeholder":
            numbers[node] = str(len(numbers))
        elif node.op == "call_function":
            numbers[node] = str(len(numbers))
            calls.append(_call(node, numbers))
        elif node.op == "output":
            made: Any = node.args[0]
            if not all(isinstance(x, Node) for x in made):
                raise _NotAlike
            likes = [(tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in made]
            names = tuple(str(x).removeprefix("torch.") for x in dtypes)
            return RecurrentStep(names, tuple(calls), tuple(numbers[x] for x in made)), likes
        else:
            raise _NotAlike
    raise AssertionError("a graph without an output")


def _call(node: Node, numbers: dict[Node, str]) -> StepCall:
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        raise _NotAlike
    if written_arguments(target) or torch.Tag.nondeterministic_seeded in target.tags:
        raise _NotAlike
    positional = iter(node.args)
    args = list[tuple[str, Arg]]()
    for argument in schema_arguments(target):
        if argument.name in node.kwargs:
            value: Any = node.kwargs[argument.name]
        elif argument.kwarg_only:
            value = argument.default_value
        else:
            value = next(positional, argument.default_value)
        if argument.name in _SIZES:
            raise _NotAlike
        args.append((argument.name, None if argument.name in _PLACES else _data(value, numbers)))
    return StepCall(str(target), tuple(args), numbers[node])


def _data(value: Any, numbers: dict[Node, str]) -> Arg:
    if isinstance(value, Node):
        return Ref(numbers[value])
    if isinstance(value, list | tuple):
        return tuple(_data(x, numbers) for x in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, _NO_TENSOR):
        return value
    raise _NotAlike
