"""What the text of a loop over tokens says of a round: what it reads, leaves and takes along."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.trace.loop_numbers import LoopNumbers, attribute_of_module
from meshwright.ir.trace.loops import SeenLoop
from meshwright.ir.trace.plain_calls import (
    NOT_OF_STEPS,
    is_of_outside,
    is_of_torch,
    is_plain,
    only_computes,
)


class NotAlike(Exception):
    """A loop is none of ours."""


@dataclass(frozen=True, slots=True)
class RoundPart:
    """Where a round has its part of a tensor."""

    dim: int
    width: int
    """How many places along that dim; 0 is one place, without the dim."""


@dataclass(slots=True)
class LoopRound:
    """What the text of a loop says of a round."""

    number: str
    rounds: int
    """How many are alike, from the first on."""
    reads: list[tuple[str, RoundPart]] = field(default_factory=list)
    """A tensor, and which part of it the round reads."""
    writes: dict[str, RoundPart] = field(default_factory=dict)
    """A tensor that it writes its part of -> which part."""
    lists: list[str] = field(default_factory=list)
    """Those at whose end it puts something."""
    carried: list[str] = field(default_factory=list)
    """Names that it reads as the round before has left them."""
    made: set[str] = field(default_factory=set)
    """All that it assigns."""
    fixed: list[str] = field(default_factory=list)
    """Names of the outside that it reads and does not assign."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of modules that it reads, `self.name` -> tensor; `fixed` names them, too."""
    outer: set[str] = field(default_factory=set)
    """Names of the file, or of Python, that it reads."""
    calls: bool = False
    """Whether it calls functions by name."""
    told: dict[str, int] = field(default_factory=dict)
    """Names that are whole numbers, as the last of these rounds leaves them."""
    kinds: dict[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of tensors of the outside that it asks for, by name."""
    lines: list[ast.stmt] = field(default_factory=list)
    """The round, with names in the place of what it reads and leaves."""


def read_text(loop: SeenLoop, rounds: int) -> LoopRound:
    """Reads what a loop's first rounds do; NotAlike if the text does not tell, or tells of more."""
    statement = loop.statement
    if statement.orelse or not isinstance(statement.target, ast.Name):
        raise NotAlike
    found = LoopRound(statement.target.id, rounds)
    values, numbers = loop.values, LoopNumbers(loop, found.number, rounds)
    assigned = {name for line in statement.body for name in _assigned(line)}
    for line in statement.body:
        rewrite = _Rewrite(found, assigned, loop, numbers)
        if name := _counted(line):
            assert isinstance(line, ast.Assign)
            each = numbers.of(line.value, assigned)
            if each and name not in found.made | found.told.keys() and name != found.number:
                numbers.named[name], found.told[name] = each, each[-1]
                continue
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
                raise NotAlike
            found.lists.append(name)
            value, target = rewrite.visit(_copy(call.args[0])), ast.Name(left_in(name), ast.Store())
        else:
            raise NotAlike
        if isinstance(target, ast.Subscript):
            name, place = _written(target, rewrite, values)
            if name in found.writes or name in assigned:
                raise NotAlike
            found.writes[name] = place
            target = ast.Name(left_in(name), ast.Store())
        elif names := _names_in(target):
            found.made.update(names)
        else:
            raise NotAlike
        found.lines.append(ast.Assign([target], value))
    outside = {*found.fixed, *(name for name, _ in found.reads)}
    left = {*found.writes, *found.lists}
    if outside & left or found.number in found.made or not (left or found.carried):
        raise NotAlike
    if found.told.keys() & found.made:
        raise NotAlike
    if loop.read_after(found.made - set(found.carried)):
        raise NotAlike
    if found.calls and not _is_all_plain(found, loop):
        raise NotAlike
    return found


def _is_all_plain(found: LoopRound, loop: SeenLoop) -> bool:
    """Whether nothing of the outside that a round names could be changed by what it calls. A call
    has a copy of what is spread into it (`**kwargs`)."""
    nodes = [x for line in found.lines for x in ast.walk(line)]
    spread = [x.value for x in nodes if isinstance(x, ast.keyword) and x.arg is None]
    read = [x for x in nodes if isinstance(x, ast.Name) and x not in spread]
    named = [loop.values[x.id] for x in read if x.id in found.fixed and x.id not in found.held]
    for x in spread:
        held = loop.values.get(x.id) if isinstance(x, ast.Name) else None
        if not isinstance(held, dict):
            return False
        named += held.values()
    return all(map(is_plain, named)) and all(is_of_outside(loop.names.get(n)) for n in found.outer)


def _copy(node: ast.expr) -> ast.expr:
    parsed = ast.parse(ast.unparse(node), mode="eval")
    return parsed.body


def _assigned(line: ast.stmt) -> Iterator[str]:
    targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
    yield from (name for x in targets if isinstance(x, ast.expr) for name in _names_in(x))


def _names_in(target: ast.expr) -> list[str]:
    """The names that a line assigns, `a, (b, c) = ...` among others; none if it assigns more."""
    if isinstance(target, ast.Name):
        return [target.id]
    if not isinstance(target, ast.Tuple):
        return []
    found = [_names_in(x) for x in target.elts]
    return [name for names in found for name in names] if all(found) else []


def _counted(line: ast.stmt) -> str:
    """The one name that a line assigns, which may be that of a number."""
    if isinstance(line, ast.Assign) and len(line.targets) == 1:
        target = line.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _appended(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append" and isinstance(node.func.value, ast.Name)
        and len(node.args) == 1 and not node.keywords
    )  # fmt: skip


def left_in(name: str) -> str:
    """Names what a round leaves in its place of a tensor, or at the end of a list; no name that
    code can have."""
    return f"left in {name}"


def part_of(number: int) -> str:
    """Names what a round reads of a tensor, by which of its reads that is."""
    return f"part {number}"


def _written(target: ast.Subscript, rewrite: "_Rewrite", values: Any) -> tuple[str, RoundPart]:
    """The tensor that a round writes its part of, whole but for that part."""
    if not isinstance(target.value, ast.Name):
        raise NotAlike
    index = indices_of(target)
    whole = values.get(target.value.id)
    if not isinstance(whole, Tensor) or len(index) > whole.ndim:
        raise NotAlike
    place = rewrite.place_of(index, whole)
    if not place or not all(_is_all(x) for i, x in enumerate(index) if i != place.dim):
        raise NotAlike
    return target.value.id, place


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

    def __init__(
        self, found: LoopRound, assigned: set[str], loop: SeenLoop, numbers: LoopNumbers
    ) -> None:
        self._found, self._assigned, self._numbers = found, assigned, numbers
        self._loop, self._values, self._names = loop, loop.values, loop.names

    def place_of(self, index: list[ast.expr], whole: Tensor) -> RoundPart | None:
        """Returns which part the round has, if some index says; NotAlike if there are too few."""
        widths = [self._numbers.width(x, self._assigned) for x in index]
        at = [i for i, width in enumerate(widths) if width is not None]
        if not at:
            return None
        width = widths[at[0]] or 0
        if len(at) > 1 or at[0] >= whole.ndim or not all(map(_is_all, index[: at[0]])):
            raise NotAlike
        if whole.shape[at[0]] < self._found.rounds * max(width, 1):
            raise NotAlike
        return RoundPart(at[0], width)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        tensor, index = node.value, indices_of(node)
        if not isinstance(tensor, ast.Name) or tensor.id in self._assigned:
            return self.generic_visit(node)
        whole = self._values.get(tensor.id)
        place = self.place_of(index, whole) if isinstance(whole, Tensor) else None
        if not place:
            return self.generic_visit(node)
        assert isinstance(whole, Tensor)
        # What is left over of a tensor that is read place by place would be another round's.
        if not place.width and whole.shape[place.dim] != self._found.rounds:
            raise NotAlike
        after = [self.visit(x) for x in index[place.dim + 1 :]]
        if not all(map(_is_constant, after)):
            raise NotAlike
        name = ast.Name(part_of(len(self._found.reads)), ast.Load())
        self._found.reads.append((tensor.id, place))
        here = [ast.Slice()] if place.width else []
        left = [*index[: place.dim], *here, *after]
        if all(map(_is_all, left)):
            return name
        return ast.Subscript(name, ast.Tuple(left, ast.Load()), ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "dtype" and isinstance(node.value, ast.Name):
            whole = self._values.get(node.value.id)
            if node.value.id not in self._assigned and isinstance(whole, Tensor):
                name = f"dtype of {node.value.id}"
                self._found.kinds[name] = whole.dtype
                return ast.Name(name, ast.Load())
        if node.attr in NOT_OF_STEPS or node.attr.endswith("_"):
            raise NotAlike
        held = attribute_of_module(node, self._loop, self._assigned)
        if isinstance(held, Tensor):
            name = ast.unparse(node)
            self._found.held[name] = held
            if name not in self._found.fixed:
                self._found.fixed.append(name)
            return ast.Name(name, ast.Load())
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Of tensors and of modules of functions, and functions that only compute; what else is
        called may do more."""
        asked = node.func
        if isinstance(asked, ast.Name):
            own = asked.id in self._assigned or asked.id in self._values
            if own or not only_computes(self._names.get(asked.id)):
                raise NotAlike
            self._found.calls = True
            return self.generic_visit(node)
        if not isinstance(asked, ast.Attribute):
            raise NotAlike
        while isinstance(asked, ast.Attribute):
            asked = asked.value
        if isinstance(asked, ast.Name) and asked.id not in self._assigned:
            held = self._values.get(asked.id, self._names.get(asked.id))
            if not isinstance(held, Tensor) and not is_of_torch(held):
                raise NotAlike
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        found, name = self._found, node.id
        if name in self._numbers.named:
            number = self._numbers.constant(node, self._assigned)
            if number is None:
                raise NotAlike
            return ast.parse(str(number), mode="eval").body
        if name in self._assigned:
            if name not in found.made and name not in found.carried:
                found.carried.append(name)
        elif name not in self._values:
            found.outer.add(name)
        elif name not in found.fixed:
            found.fixed.append(name)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Lambda | ast.comprehension | ast.NamedExpr | ast.Await | ast.Yield):
            raise NotAlike
        return super().generic_visit(node)


def indices_of(node: ast.Subscript) -> list[ast.expr]:
    """Returns what a subscript says of each dim."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
