"""What the backward of a block has at once beside what the block saved: gradients of values on
their way, less what ops have saved whose backward has run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import NamedTuple

from meshwright.costmodel.block.moved_room import moved_back
from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.block.reprice import MoveStep, OpStep, PricedInput, SavedKey
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Block, Kind
from meshwright.ir.graph.temporaries import is_sum
from meshwright.ir.layout.layout import Partial
from meshwright.ir.ops import facts

_LINEAR = "aten.linear.default"


class Room(NamedTuple):
    """Bytes beside all that a block has saved, and gradients of all its parameters."""

    most: int
    """Where gradients of parameters are there from the beginning."""
    growing: int
    """Where there are none before the op that makes each: less than 0 if they come late."""
    adding: int
    """More than `most` where what each op makes of them is added to those that are there."""
    at: float
    """Share of the backward's time after which there is that much."""
    one_op: int
    """What one op has with its operands and results, and gradients that the block was given."""


def backward_room(walk: Walk, saved: Mapping[SavedKey, int], left: Mapping[str, Where]) -> Room:
    """Returns the most bytes that are there at once in the backward of what a walk has been
    through. `saved`: of it, what goes with the block; `left`: values that leave, and how: their
    gradients are there before."""
    ops = [step for step in walk.script if isinstance(step, OpStep)]
    pairs = [pair for pair in zip(ops, walk.rooms, strict=True) if pair[0].has_gradient]
    steps = [step for step, _ in pairs]
    roots, most, freed, adding = _of_gradients(walk, ops), 0, 0, 0
    to_come = _gradients_to_come(walk, steps)
    made_of = _WeightGradients(walk, steps)
    growing, at, late_s = -sum(to_come.values()), 0.0, _until(walk, ops)
    freed_by = _freed_by(saved, steps)
    leaves = _Leaves(walk, steps, roots)
    live, one_op, moves = _Live(_entering(walk, left, roots)), 0, _moves_before(walk)
    for number in range(len(steps), -1, -1):
        if moved := _moved_bytes(walk, live, moves[number], roots):
            then = moved - freed
            most, growing = max(most, then), max(growing, then - sum(to_come.values()))
            adding, one_op = max(adding, then + made_of.waiting_bytes), max(one_op, moved)
        for name in _scattered(walk, moves[number]):
            live.goes([name], ())
            to_come.pop(name, None)
        if not number:
            break
        number -= 1
        step = steps[number]
        if step.op_class is not OpClass.VIEW or _changes_size(step, walk.local.elements):
            elements = walk.local.elements
            made, passed, new = _made_by(walk, step, roots, live)
            own, again = made_of.by(step)
            narrow, widest = made_of.cast_by(step)
            beside, least, before, *_ = pairs[number][1]
            beside += _of_unused_parts(step, elements, lambda n: live.has(roots.get(n, n)))
            now = live.nbytes + new + beside
            now = (max(now, least) if least else now) + again
            if facts(step.op.target).lets_go:
                now -= live.own_bytes([roots.get(name, name) for name in step.op.outputs])
            halves = pairs[number][1].halves
            if halves and halves.adds_early:
                now -= live.own_bytes(made)
            early = live.nbytes + new + before - freed
            results = {roots.get(name, name) for name in step.op.outputs}
            alone = _alone(step, elements) + max(beside, before) + again + made_of.sum_bytes(step)
            one_op = max(one_op, alone + live.given_beside(results))
            if before:
                most = max(most, early)
                adding = max(adding, early + made_of.waiting_bytes)
                if early - sum(to_come.values()) > growing:
                    growing = early - sum(to_come.values())
                    at = late_s.get(step.op.name, 0.0)
            scattered = made_of.gathered(step)
            for name in step.op.inputs:
                if roots.get(name, name) not in scattered:
                    to_come.pop(roots.get(name, name), None)
            less = sum(to_come.values())
            most = max(most, now - freed)
            # Those of copies are narrow until the op has run.
            late = own - narrow if narrow else 0
            adds = pairs[number][1].adding
            there = now - again + own - late if adds is None else live.nbytes + new + adds
            adding = max(adding, there - freed + made_of.waiting_bytes)
            if now - freed - less - late > growing:
                growing, at = now - freed - less - late, late_s.get(step.op.name, 0.0)
            live.goes(results, passed)
            back = _cast_back(step, elements, lambda n: live.has(roots[n]))
            apart = max(live.comes(made | scattered), back, made_of.cast_before(step))
            leaves.have_read(step, live)
            freed += freed_by[number]
            if apart:  # the op has run, and what it made is added to what others have, too
                then = live.nbytes - freed + apart
                most, growing = max(most, then), max(growing, then - less - late)
                adding = max(adding, then + narrow + made_of.waiting_bytes)
            if narrow:  # they are cast, one after the other
                then = live.nbytes - freed + narrow
                growing = max(growing, then - less)
                adding = max(adding, then + widest + made_of.waiting_bytes)
            if again:  # the op has run, and its gradients are added to those that wait
                then = live.nbytes - freed + again + made_of.sum_bytes(step)
                most, growing = max(most, then), max(growing, then - less)
                adding = max(adding, then - again + own + made_of.waiting_bytes)
            made_of.waits(step)
        else:
            freed += freed_by[number]
    return Room(most, growing, adding - most, at, one_op)


class SplitRoom(NamedTuple):
    """Bytes of a backward in two halves (`runtime.stage.split`), beside all that is saved."""

    first: int
    """Most in the first half."""
    kept: int
    """Gradients that the second half begins with."""
    released: int
    """Of what is saved, what goes with the first half: no op before it has a parameter."""
    released_outputs: int
    """The same of what leaves the block, where nobody else has that."""
    second: int | None
    """Most in the second half, beside what it begins with and gradients of its parameters; None if
    that is a whole backward."""
    adding: int | None = None
    """By which it is more where these are added to those that are there; None: not known."""
    late: int = 0
    """By which it is less where there are none before, as they come one after the other."""
    leaves: frozenset[str] = frozenset()
    """Values of which nothing is kept for the second half: no op that has part in that reads them,
    or what is made of them."""


def split_room(
    walk: Walk,
    saved: Mapping[SavedKey, int],
    leaving: Mapping[SavedKey, int],
    block: Block,
    left: Mapping[str, Where],
) -> SplitRoom:
    """Returns what the halves of a block's backward have. `saved`: what goes with the block;
    `leaving`: what it has saved of what leaves it; `left`: how that does."""
    ops = [step for step in walk.script if isinstance(step, OpStep)]
    pairs = [pair for pair in zip(ops, walk.rooms, strict=True) if pair[0].has_gradient]
    steps = [step for step, _ in pairs]
    roots, elements = _of_gradients(walk, ops), walk.local.elements
    made_of = _WeightGradients(walk, steps)
    freed_by = list(zip(_freed_by(saved, steps), _freed_by(leaving, steps), strict=True))
    leaves = _Leaves(walk, steps, roots)
    live, moves = _Live(_entering(walk, left, roots)), _moves_before(walk)
    given_bytes = first = live.nbytes
    # A half that runs all once more has all of the graph.
    joined = runs_again = any([room.halves and room.halves.runs_again for _, room in pairs])
    if runs_again:
        live.keeps_given()
    released, released_outputs, second, added = 0, 0, 0, 0
    graph, kept = set[str](), set[str]()
    turns: list[tuple[int, int, int]] = []
    for number in range(len(steps), -1, -1):
        first = max(first, _moved_bytes(walk, live, moves[number], roots))
        if not number:
            break
        number -= 1
        step, room = pairs[number]
        beside, least, before, *_ = room
        halves, gathered = room.halves, room.gathered
        if step.op_class is not OpClass.VIEW or _changes_size(step, elements):
            made, passed, new = _made_by(walk, step, roots, live)
            inside = halves.first if halves else before or beside - gathered
            now = live.with_kept_bytes + new + inside
            results = {roots.get(name, name) for name in step.op.outputs}
            if halves and not halves.keeps_given and facts(step.op.target).lets_go:
                now -= live.own_bytes(results)
            if halves and halves.adds_early:
                now -= live.own_bytes(made)
            first = max(first, now, least and least + live.kept_bytes)
            if halves and made_of.reads(step):
                joined, own = True, made_of.by(step)[0]
                again = live.made_bytes(results) * halves.runs_again
                place = -1 if halves.runs_again else made_of.place(step, block)
                turns.append((place, own, again + halves.growing - own))
                second = max(second, again + halves.growing - own)
                added = max(added, again + halves.adding)
                live.keeps_inside(step.op.name, halves.kept)
                live.keeps(results if halves.keeps_given else ())
            elif made_of.reads(step):
                own, parts = made_of.by(step)[0], made_of.part_bytes(step)
                narrow, widest = made_of.cast_by(step)
                # What is narrow is cast when the op has run, and there meanwhile.
                inside = (narrow or own) + beside
                whole = _Live(())
                whole.comes(made_of.gathered(step))
                most = max(inside, before, _moved_bytes(walk, whole, moves[number], roots))
                if facts(step.op.target).backward_inside:  # tokens' are made again, and go
                    most = max(most, inside + new)
                more = max(most - own - parts, narrow)
                joined, second = True, max(second, more)
                turns.append((made_of.place(step, block), own + parts, more))
                added = max(added, most, narrow + widest)
                live.keeps(results)
            live.goes(results, passed)
            back = _cast_back(step, elements, lambda n: live.has(roots[n]))
            if apart := max(live.comes(made), back):
                first = max(first, live.with_kept_bytes + apart)
            leaves.have_read(step, live)
        if not joined:
            released += freed_by[number][0]
            released_outputs += freed_by[number][1]
        made_here = {roots.get(name, name) for name in step.op.outputs}
        if made_of.reads(step) or not graph.isdisjoint(made_here):
            # Its node stays, and those behind it, down to leaves.
            graph |= {roots.get(name, name) for name in step.op.inputs}
            kept |= {tensor.memory[0] for tensor in step.kept}
    if not any([walk.facts.graph.tensors[name].requires_grad for name in block.inputs]):
        return SplitRoom(given_bytes, given_bytes, 0, 0, None)  # the second half does all
    if made_of.several:
        return SplitRoom(first + given_bytes, live.kept_bytes + given_bytes, 0, 0, None)
    more, late = added - second, second - _growing(turns)
    tensors = walk.facts.graph.tensors
    goes = frozenset([
        name for name in block.inputs * (not runs_again)
        if walk.facts.roots[name] not in kept
        and not (tensors[name].requires_grad and roots.get(name, name) in graph)
    ])  # fmt: skip
    return SplitRoom(first, live.kept_bytes, released, released_outputs, second, more, late, goes)


def _growing(turns: Iterable[tuple[int, int, int]]) -> int:
    """Most in a second half beside gradients of all its parameters, of which it makes those of one
    op after the other: where the first of an op is among the block's parameters, bytes of its
    gradients, and what is there beside these. Nothing else goes meanwhile."""
    found, later = 0, 0
    for _, own, beside in sorted(turns, reverse=True):
        found = max(found, beside - later)
        later += own
    return found


class _Live:
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


class _Leaves:
    """What came into the block, with how many of its ops have yet to hand it a gradient."""

    def __init__(self, walk: Walk, steps: Sequence[OpStep], roots: Mapping[str, str]) -> None:
        made = {roots.get(n, n) for step in steps for n in step.op.outputs}
        self._roots = roots
        self._elements = walk.local.elements
        self._left = Counter([n for step in steps for n, _ in self._read(step) if n not in made])

    def have_read(self, step: OpStep, live: _Live) -> None:
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


class _WeightGradients:
    """Gradients of parameters as ops make them. Those of one that several ops of the block read are
    added up before anything else has them: the first is there until the last."""

    def __init__(self, walk: Walk, steps: Sequence[OpStep]) -> None:
        self._walk = walk
        self._roots, self._elements = walk.facts.roots, walk.local.elements
        self._left = Counter([name for step in steps for name, _ in self._of(step)])
        self._waiting: dict[str, int] = {}

    @property
    def several(self) -> bool:
        """Whether several ops read one parameter."""
        return any([count > 1 for count in self._left.values()])

    def reads(self, step: OpStep) -> bool:
        """Whether an op reads a parameter that is trained."""
        return bool(self._of(step) or self.gathered(step))

    def gathered(self, step: OpStep) -> dict[str, int]:
        """Parameter -> bytes of its gradient as an op makes it, of those that lie otherwise than
        the op reads them: it is no parameter's gradient before it is moved."""
        return {
            self._roots.get(name, name): self._elements[operand.value] * operand.own_width
            for name, operand in self._moved(step)
        }

    def part_bytes(self, step: OpStep) -> int:
        """Returns bytes of these once they lie as the parameters do."""
        return sum(
            [_stored_bytes(self._walk, name, operand) for name, operand in self._moved(step)]
        )

    def cast_before(self, step: OpStep) -> int:
        """Returns the most that one of these takes in the dtype that the op computes in."""
        narrow = [x for _, x in self._moved(step) if x.width < x.own_width]
        return max([self._elements[x.value] * x.width for x in narrow], default=0)

    def _moved(self, step: OpStep) -> Iterator[tuple[str, PricedInput]]:
        if step.op_class is OpClass.VIEW:
            return
        for name, where, operand in zip(step.op.inputs, step.places[0], step.inputs, strict=True):
            if operand.requires_grad and _lies_otherwise(self._walk, name, where, operand):
                yield name, operand

    def place(self, step: OpStep, block: Block) -> int:
        """Where the first parameter that an op reads is among those of its block."""
        own = {name for name, _ in self._of(step)} | self.gathered(step).keys()
        roots = [self._roots.get(name, name) for name in block.params]
        return min([i for i, name in enumerate(roots) if name in own], default=0)

    @property
    def waiting_bytes(self) -> int:
        return sum(self._waiting.values())

    def by(self, step: OpStep) -> tuple[int, int]:
        """Returns bytes of those that an op makes; and of these, of which others wait."""
        own = self._of(step)
        again = [nbytes for name, nbytes in own if name in self._waiting]
        return sum([nbytes for _, nbytes in own]), sum(again)

    def cast_by(self, step: OpStep) -> tuple[int, int]:
        """Returns bytes of the gradients that an op makes of copies that autocast has made of
        parameters, and those of the largest when it is cast back; (0, 0): of none."""
        target = step.op.target
        if not target.startswith("aten.") or facts(target).cpu_casts:
            return 0, 0  # fused operators and cells say themselves what they have
        found = [
            (self._elements[operand.value] * operand.width,
             self._elements[operand.value] * operand.own_width)
            for name, where, operand in zip(
                step.op.inputs, step.places[0], step.inputs, strict=True
            )
            if operand.is_param and operand.requires_grad and operand.width < operand.own_width
            and not _lies_otherwise(self._walk, name, where, operand)
        ]  # fmt: skip
        return sum([made for made, _ in found]), max([wide for _, wide in found], default=0)

    def sum_bytes(self, step: OpStep) -> int:
        """Returns the most that a sum takes beside its two terms: autograd adds to the first in
        place, unless that is a view, as those of a linear layer are."""
        if step.op.target != _LINEAR:
            return 0
        return max([nbytes for name, nbytes in self._of(step) if name in self._waiting], default=0)

    def waits(self, step: OpStep) -> None:
        """The op has run."""
        for name, nbytes in self._of(step):
            self._left[name] -= 1
            self._waiting[name] = nbytes
            if not self._left[name]:
                del self._waiting[name]

    def _of(self, step: OpStep) -> list[tuple[str, int]]:
        if step.op_class is OpClass.VIEW:
            return []
        return [
            (self._roots.get(name, name), self._elements[operand.value] * operand.own_width)
            for name, where, operand in zip(
                step.op.inputs, step.places[0], step.inputs, strict=True
            )
            if operand.is_param and operand.requires_grad
            and not _lies_otherwise(self._walk, name, where, operand)
        ]  # fmt: skip


def _lies_otherwise(walk: Walk, name: str, where: Where, operand: PricedInput) -> bool:
    """Whether a parameter is stored in other parts than an op reads."""
    return operand.is_param and walk.normal(where) != walk.normal(walk.placed.get(name, {}))


def _stored_bytes(walk: Walk, name: str, operand: PricedInput) -> int:
    """Of a parameter, as it is stored, in its own dtype."""
    where = walk.placed.get(name)
    number = operand.value if where is None else walk.local.number(name, where)
    return walk.local.elements[number] * operand.own_width


def _scattered(walk: Walk, moves: Iterable[MoveStep]) -> Iterator[str]:
    """Parameters whose gradients have been moved, and count as theirs from now on."""
    for step in moves:
        if walk.facts.graph.tensors[step.name].kind is Kind.PARAMETER:
            yield walk.facts.roots.get(step.name, step.name)


def _made_by(
    walk: Walk, step: OpStep, roots: Mapping[str, str], live: _Live
) -> tuple[dict[str, int], set[str], int]:
    """Gradients of operands that an op makes, those that are the gradient of its result, and bytes
    of all that it makes."""
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


def _cast_back(step: OpStep, elements: Sequence[int], has_gradient: Callable[[str], bool]) -> int:
    """Most bytes beside gradients of an op's operands while one is cast to what the value is in:
    the gradient of its copy, and where that is to be added to another, what is added."""
    return max([
        elements[operand.value] * (operand.width + operand.gradient_width * has_gradient(name))
        for name, operand in zip(step.op.inputs, step.inputs, strict=True)
        if operand.requires_grad and not operand.is_param
        and operand.gradient_width != operand.width
    ], default=0)  # fmt: skip


def _alone(step: OpStep, elements: Sequence[int]) -> int:
    """Bytes of an op's operands and results."""
    operands = [elements[i.value] * i.width for i in step.inputs if not i.is_param]
    return sum(operands) + sum([elements[value] * width for value, width in step.outputs])


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


def _until(walk: Walk, ops: Sequence[OpStep]) -> dict[str, float]:
    """Op -> share of the backward's time that is over as its own begins."""
    each = [time.backward_input_s + time.backward_weight_s for time in walk.times]
    whole, gone, found = sum(each), 0.0, dict[str, float]()
    for step, own_s in zip(reversed(ops), reversed(each), strict=True):
        found[step.op.name] = gone / whole if whole else 0.0
        gone += own_s
    return found


def _gradients_to_come(walk: Walk, steps: Sequence[OpStep]) -> dict[str, int]:
    """Parameter -> bytes of its gradient, of those that ops of the block make as they read them."""
    elements, found = walk.local.elements, dict[str, int]()
    for step in steps:
        for name, where, operand in zip(step.op.inputs, step.places[0], step.inputs, strict=True):
            if operand.requires_grad and operand.is_param and step.op_class is not OpClass.VIEW:
                nbytes = elements[operand.value] * operand.own_width
                if _lies_otherwise(walk, name, where, operand):
                    nbytes = _stored_bytes(walk, name, operand)
                found[walk.facts.roots.get(name, name)] = nbytes
    return found


def _entering(
    walk: Walk, left: Mapping[str, Where], roots: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    tensors = walk.facts.graph.tensors
    for name, where in left.items():
        if tensors[name].requires_grad:
            yield roots[name], walk.nbytes(name, where)


def _moves_before(walk: Walk) -> Mapping[int, Sequence[MoveStep]]:
    """Number of an op with a gradient -> the conversions before it that have one, the last first;
    those after the last op have the number after that."""
    found, number = defaultdict[int, list[MoveStep]](list), 0
    for step in walk.script:
        if isinstance(step, OpStep):
            number += step.has_gradient
        elif step.has_gradient:
            found[number].insert(0, step)
    return found


def _moved_bytes(
    walk: Walk, live: "_Live", moves: Iterable[MoveStep], roots: Mapping[str, str]
) -> int:
    """Gradients are moved, one after the other. Returns the most bytes of all that are there; 0 if
    none is."""
    most = 0
    for step in moves:
        moved = moved_back(walk, step)
        if not moved.is_same:
            width = DTYPE_BYTES[walk.facts.dtypes[step.name]]
            sizes = [width * elements for elements in (moved.before, moved.after, moved.beside)]
            most = max(most, live.moves(roots.get(step.name, step.name), *sizes))
    return most


def _changes_size(step: OpStep, elements: Sequence[int]) -> bool:
    """Whether a view has other bytes than what it views: its gradient is no view of that's then,
    but filled up with zeros or summed."""
    whole = step.inputs[0]
    nbytes = elements[whole.value] * whole.width
    return any(elements[value] * width != nbytes for value, width in step.outputs)


def _of_unused_parts(
    step: OpStep, elements: Sequence[int], has_gradient: Callable[[str], bool]
) -> int:
    """Bytes of the zeros that stand for gradients of parts of a cut which nothing has read."""
    if step.op_class is not OpClass.VIEW or len(step.op.outputs) < 2:
        return 0
    names = [name for name in step.op.outputs if name]
    used = [
        elements[value]
        for name, (value, _) in zip(names, step.outputs, strict=True)
        if has_gradient(name)
    ]
    whole = step.inputs[0]
    return (elements[whole.value] - sum(used)) * whole.width


def _of_gradients(walk: Walk, ops: Sequence[OpStep]) -> Mapping[str, str]:
    """Value -> that whose gradient its own is a view of."""
    found = dict(walk.facts.roots)
    for step in ops:
        for name in step.op.outputs:
            is_view = step.op_class is OpClass.VIEW
            if not name or (found[name] == name and not is_view):
                continue
            if is_view and _changes_size(step, walk.local.elements):
                found[name] = name
            elif found[name] == name:  # its gradient is a view, whether or not it had to copy
                found[name] = found[step.op.inputs[0]]
            else:
                root = found[name]
                found[name] = next(
                    (found[n] for n in step.op.inputs if n and walk.facts.roots[n] == root), root
                )
    return found


def _freed_by(saved: Mapping[SavedKey, int], steps: Sequence[OpStep]) -> list[int]:
    """Per op, bytes that go when its backward has run: of what it was the first to save."""
    seen = set[SavedKey]()
    found = []
    for step in steps:
        own = {kept.key for kept in step.kept if kept.key} | {(step.op.name, "extra", ())}
        found.append(sum([saved.get(key, 0) for key in own - seen]))
        seen |= own
    return found
