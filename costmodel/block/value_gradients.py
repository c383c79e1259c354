"""Gradients of values as the backward of a block makes, adds up and moves them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod

from meshwright.costmodel.block.moved_room import moved_back
from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.block.reprice import MoveStep, OpStep, SavedKey
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.graph.temporaries import is_sum
from meshwright.ir.layout.layout import Partial
from meshwright.ir.ops import facts


class LiveGradients:
    """Gradients of values that are there: those of the terms of a sum are one tensor. Those that
    enter stay to the end of the block: who calls its backward has them."""

    def __init__(self, entering: Iterable[tuple[str, int]]) -> None:
        self._of: dict[str, tuple[str, ...]] = {}
        """Value -> its gradient, named by those that first had it."""
        self._sizes: dict[tuple[str, ...], int] = {}
        self._kept: dict[tuple[str, ...], int] = {}
        self._entered: frozenset[tuple[str, ...]] = frozenset()
        self.comes(dict(entering))
        self._entered = frozenset(self._sizes)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def given_beside(self, names: Collection[str]) -> int:
        """Bytes of the gradients that have entered, but for those of the values named."""
        own = {self._of[name] for name in names if name in self._of}
        return sum([self._sizes[key] for key in self._entered - own])

    def has(self, name: str) -> bool:
        return name in self._of

    def own_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the gradients of these values that nobody else has."""
        own = [name for name in names if name in self._of and not self._is_of_others(name)]
        return sum([self._sizes[self._of[name]] for name in own])

    def comes(self, made: Mapping[str, int]) -> int:
        """Values without a gradient get one of so many bytes; to one that somebody else has nothing
        is added in place. Returns the most bytes that are added then, beside their sum."""
        apart = 0
        for name, nbytes in made.items():
            if name in self._of and self._is_of_others(name):
                del self._of[name]
                apart = max(apart, nbytes)
            if name not in self._of:
                key: tuple[str, ...] = (name,)
                # Terms of a sum still have an earlier one.
                while key in self._sizes or key in self._kept:
                    key += (name,)
                self._of[name], self._sizes[key] = key, nbytes
        return apart

    def moves(self, name: str, before: int, after: int, beside: int) -> int:
        """The gradient of a value has so many bytes before and after it is moved, and others are
        there meanwhile. Returns the bytes of all; 0 if there is none that has so many before."""
        if name not in self._of or self._sizes[self._of[name]] != before:
            return 0
        most = self.with_kept_bytes + after + beside
        self.goes([name], ())
        self.comes({name: after})
        return most

    def _is_of_others(self, name: str) -> bool:
        key = self._of[name]
        if key in self._kept or key in self._entered:
            return True
        return any([other != name and theirs == key for other, theirs in self._of.items()])

    def lands(self, name: str, nbytes: int) -> None:
        """The gradient of a leaf, of so many bytes, is complete: it is copied if others have that
        tensor, too, or it is a part of one."""
        if name in self._of and (self._is_of_others(name) or self._sizes[self._of[name]] != nbytes):
            self.goes([name], ())
            self.comes({name: nbytes})

    @property
    def kept_bytes(self) -> int:
        return sum(self._kept.values())

    @property
    def with_kept_bytes(self) -> int:
        return sum((self._kept | self._sizes).values())

    def keeps(self, names: Iterable[str]) -> None:
        """The gradients of these values stay, whoever else has read them."""
        for name in names:
            if name in self._of:
                self._kept[self._of[name]] = self._sizes[self._of[name]]

    def keeps_given(self) -> None:
        """Those that have entered stay."""
        self._kept |= {key: self._sizes[key] for key in self._entered}

    def keeps_inside(self, op: str, nbytes: int) -> None:
        """So much stays of what an op has made inside."""
        if nbytes:
            self._kept[op, "inside"] = nbytes

    def made_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the gradients of these values, but for those that have entered."""
        keys = {self._of[name] for name in names if name in self._of} - self._entered
        return sum([self._sizes[key] for key in keys])

    def goes(self, names: Iterable[str], passed: Iterable[str]) -> None:
        """Gradients have been read, and are those of the values that are `passed` now."""
        keys = [self._of.pop(name) for name in names if name in self._of]
        self._of |= {name: keys[0] for name in passed if keys}
        there = {*self._of.values(), *self._entered}
        self._sizes = {key: nbytes for key, nbytes in self._sizes.items() if key in there}


class Leaves:
    """What came into the block, with how many of its ops have yet to hand it a gradient."""

    def __init__(self, walk: Walk, steps: Sequence[OpStep], roots: Mapping[str, str]) -> None:
        made = {roots.get(n, n) for step in steps for n in step.op.outputs}
        self._roots = roots
        self._elements = walk.local.elements
        self._left = Counter([n for step in steps for n, _ in self._read(step) if n not in made])

    def have_read(self, step: OpStep, live: LiveGradients) -> None:
        """The backward of an op has run."""
        for name, nbytes in self._read(step):
            if name in self._left:
                self._left[name] -= 1
                if not self._left[name]:
                    live.lands(name, nbytes)

    def _read(self, step: OpStep) -> list[tuple[str, int]]:
        if step.op_class is OpClass.VIEW:
            return []
        return [
            (self._roots.get(name, name), self._elements[operand.value] * operand.gradient_width)
            for name, operand in zip(step.op.inputs, step.inputs, strict=True)
            if operand.requires_grad and not operand.is_param
        ]


def made_by(
    walk: Walk, step: OpStep, roots: Mapping[str, str], live: LiveGradients
) -> tuple[dict[str, int], set[str], int]:
    """Returns gradients of operands that an op makes, those that are the gradient of its result,
    and bytes of all that it makes."""
    made, passed, new = dict[str, int](), set[str](), 0
    elements, spreads = walk.local.elements, _spreads(walk, step)
    for name, operand in zip(step.op.inputs, step.inputs, strict=True):
        if operand.requires_grad and not operand.is_param:
            nbytes = elements[operand.value] * operand.width
            is_passed = spreads or _is_sum(step, nbytes, elements) or _is_part(walk, step, name)
            if is_passed and not live.has(roots[name]):
                passed.add(roots[name])
                continue
            new += nbytes
            made.setdefault(roots[name], elements[operand.value] * operand.gradient_width)
    return made, passed, new


def cast_back(step: OpStep, elements: Sequence[int], has_gradient: Callable[[str], bool]) -> int:
    """Returns the most bytes beside gradients of an op's operands while one is cast to what the
    value is in: the gradient of its copy, and where that is added to another, what is added."""
    return max([
        elements[operand.value] * (operand.width + operand.gradient_width * has_gradient(name))
        for name, operand in zip(step.op.inputs, step.inputs, strict=True)
        if operand.requires_grad and not operand.is_param
        and operand.gradient_width != operand.width
    ], default=0)  # fmt: skip


def _is_sum(step: OpStep, nbytes: int, elements: Sequence[int]) -> bool:
    """Whether the gradient of an operand that takes so many bytes is that of what the op makes."""
    ((value, width), *_) = step.outputs
    return is_sum(step.op) and elements[value] * width == nbytes


def _is_part(walk: Walk, step: OpStep, name: str) -> bool:
    """Whether the gradient of what an op copies is a part of its result's, as of values that are
    put side by side: a view. That of a leaf of the block is copied, if it does not lie in one."""
    if step.op_class is not OpClass.COPY or facts(step.op.target).backward != "handed on":
        return False
    ((value, width), *_) = step.outputs
    operand = step.inputs[step.op.inputs.index(name)]
    if operand.is_cast or operand.width != width:
        return False
    shapes = walk.local.shapes
    dims = zip(shapes[value], shapes[operand.value], strict=False)
    before = takewhile(lambda sizes: sizes[0] == sizes[1], dims)
    in_one = prod([size for size, _ in before]) in (1, walk.local.elements[value])
    root = walk.facts.roots.get(name, name)
    return in_one or any(isinstance(s, OpStep) and root in s.op.outputs for s in walk.script)


def _spreads(walk: Walk, step: OpStep) -> bool:
    """Whether the gradient of a sum's operand is a view of its result's, spread out. A mean over
    parts of a value is a sum that is divided."""
    if step.op_class is not OpClass.REDUCTION or step.inputs[0].width != step.outputs[0][1]:
        return False
    if step.op.target.startswith("aten.mean."):
        whole = prod(walk.facts.graph.tensors[step.op.inputs[0]].shape)
        is_part = walk.local.elements[step.inputs[0].value] < whole
        return is_part and any(isinstance(s.outputs[0], Partial) for s in step.strategies.values())
    return facts(step.op.target).backward == "handed on"


def entering(
    walk: Walk, left: Mapping[str, Where], roots: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """Yields values that leave and have a gradient, with its bytes."""
    tensors = walk.facts.graph.tensors
    for name, where in left.items():
        if tensors[name].requires_grad:
            yield roots[name], walk.nbytes(name, where)


def moves_before(walk: Walk) -> Mapping[int, Sequence[MoveStep]]:
    """Returns, by the number of an op with a gradient, the conversions before it that have one, the
    last first; those after the last op have the number after that."""
    found, number = defaultdict[int, list[MoveStep]](list), 0
    for step in walk.script:
        if isinstance(step, OpStep):
            number += step.has_gradient
        elif step.has_gradient:
            found[number].insert(0, step)
    return found


def moved_bytes(
    walk: Walk, live: "LiveGradients", moves: Iterable[MoveStep], roots: Mapping[str, str]
) -> int:
    """Moves gradients, one after the other. Returns the most bytes of all that are there; 0 if
    none is."""
    most = 0
    for step in moves:
        moved = moved_back(walk, step)
        if not moved.is_same:
            width = DTYPE_BYTES[walk.facts.dtypes[step.name]]
            sizes = [width * elements for elements in (moved.before, moved.after, moved.beside)]
            most = max(most, live.moves(roots.get(step.name, step.name), *sizes))
    return most


def changes_size(step: OpStep, elements: Sequence[int]) -> bool:
    """Tells whether a view has other bytes than what it views: its gradient is no view of that's
    then, but filled up with zeros or summed."""
    whole = step.inputs[0]
    nbytes = elements[whole.value] * whole.width
    return any(elements[value] * width != nbytes for value, width in step.outputs)


def of_gradients(walk: Walk, ops: Sequence[OpStep]) -> Mapping[str, str]:
    """Returns, by value, that whose gradient its own is a view of."""
    found = dict(walk.facts.roots)
    for step in ops:
        for name in step.op.outputs:
            is_view = step.op_class is OpClass.VIEW
            if not name or (found[name] == name and not is_view):
                continue
            if is_view and changes_size(step, walk.local.elements):
                found[name] = name
            elif found[name] == name:  # its gradient is a view, whether or not it had to copy
                found[name] = found[step.op.inputs[0]]
            else:
                root = found[name]
                found[name] = next(
                    (found[n] for n in step.op.inputs if n and walk.facts.roots[n] == root), root
                )
    return found


def freed_by(saved: Mapping[SavedKey, int], steps: Sequence[OpStep]) -> list[int]:
    """Returns, per op, bytes that go when its backward has run: of what it first saved."""
    seen = set[SavedKey]()
    found = []
    for step in steps:
        own = {kept.key for kept in step.kept if kept.key} | {(step.op.name, "extra", ())}
        found.append(sum([saved.get(key, 0) for key in own - seen]))
        seen |= own
    return found
