"""What the backward of a block has at once beside what the block saved: gradients of values on
their way, less what ops have saved whose backward has run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.block.reprice import MoveStep, OpStep, SavedKey
from meshwright.costmodel.block.value_gradients import (
    Leaves,
    LiveGradients,
    cast_back,
    changes_size,
    entering,
    freed_by,
    made_by,
    moved_bytes,
    moves_before,
    of_gradients,
)
from meshwright.costmodel.block.weight_gradients import (
    WeightGradients,
    lies_otherwise,
    stored_bytes,
)
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Kind
from meshwright.ir.ops import facts


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
    roots, most, freed, adding = of_gradients(walk, ops), 0, 0, 0
    to_come = _gradients_to_come(walk, steps)
    made_of = WeightGradients(walk, steps)
    growing, at, late_s = -sum(to_come.values()), 0.0, _until(walk, ops)
    frees = freed_by(saved, steps)
    leaves = Leaves(walk, steps, roots)
    live, one_op, moves = LiveGradients(entering(walk, left, roots)), 0, moves_before(walk)
    for number in range(len(steps), -1, -1):
        if moved := moved_bytes(walk, live, moves[number], roots):
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
        if step.op_class is not OpClass.VIEW or changes_size(step, walk.local.elements):
            elements = walk.local.elements
            made, passed, new = made_by(walk, step, roots, live)
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
            back = cast_back(step, elements, lambda n: live.has(roots[n]))
            apart = max(live.comes(made | scattered), back, made_of.cast_before(step))
            leaves.have_read(step, live)
            freed += frees[number]
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
            freed += frees[number]
    return Room(most, growing, adding - most, at, one_op)


def _scattered(walk: Walk, moves: Iterable[MoveStep]) -> Iterator[str]:
    """Parameters whose gradients have been moved, and count as theirs from now on."""
    for step in moves:
        if walk.facts.graph.tensors[step.name].kind is Kind.PARAMETER:
            yield walk.facts.roots.get(step.name, step.name)


def _alone(step: OpStep, elements: Sequence[int]) -> int:
    """Bytes of an op's operands and results."""
    operands = [elements[i.value] * i.width for i in step.inputs if not i.is_param]
    return sum(operands) + sum([elements[value] * width for value, width in step.outputs])


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
                if lies_otherwise(walk, name, where, operand):
                    nbytes = stored_bytes(walk, name, operand)
                found[walk.facts.roots.get(name, name)] = nbytes
    return found


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
