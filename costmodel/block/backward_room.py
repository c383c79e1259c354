"""What the backward of a block has at once beside what the block saved: gradients of values on
their way, less what ops have saved whose backward has run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.block.reprice import OpStep, SavedKey
from meshwright.ir.cluster.device import OpClass


class Room(NamedTuple):
    """Bytes beside all that a block has saved, and gradients of all its parameters."""

    most: int
    """Where gradients of parameters are there from the beginning."""
    growing: int
    """Where there are none before the op that makes each: less than 0 if they come late."""
    growing_held: int
    """The same where nothing that was saved goes before the end."""


def backward_room(walk: Walk, saved: Mapping[SavedKey, int], left: Collection[str]) -> Room:
    """Returns the most bytes that are there at once in the backward of what a walk has been
    through. `saved`: of it, what goes with the block; `left`: values that leave, whose gradients
    are there before."""
    ops = [step for step in walk.script if isinstance(step, OpStep)]
    pairs = [pair for pair in zip(ops, walk.rooms, strict=True) if pair[0].has_gradient]
    steps = [step for step, _ in pairs]
    roots, most, freed = walk.facts.roots, 0, 0
    to_come = _gradients_to_come(walk, steps)
    growing = held = -sum(to_come.values())
    freed_by = _freed_by(saved, steps)
    live = dict(_entering(walk, left))
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        if step.op_class is not OpClass.VIEW:
            made = dict[str, int]()
            new = 0
            elements = walk.local.elements
            for name, operand in zip(step.op.inputs, step.inputs, strict=True):
                if operand.requires_grad and not operand.is_param:
                    nbytes = elements[operand.value] * operand.width
                    new += nbytes
                    made.setdefault(roots[name], nbytes)
            beside, least = pairs[number][1]
            now = max(sum(live.values()) + new + beside, least)
            for name in step.op.inputs:
                to_come.pop(roots.get(name, name), None)
            less = sum(to_come.values())
            most, held = max(most, now - freed), max(held, now - less)
            growing = max(growing, now - freed - less)
            for name in step.op.outputs:
                live.pop(roots.get(name, name), None)
            live |= {name: nbytes for name, nbytes in made.items() if name not in live}
        freed += freed_by[number]
    return Room(most, growing, held)


def _gradients_to_come(walk: Walk, steps: Sequence[OpStep]) -> dict[str, int]:
    """Parameter -> bytes of its gradient, of those that ops of the block make as they read them."""
    elements, found = walk.local.elements, dict[str, int]()
    for step in steps:
        for name, operand in zip(step.op.inputs, step.inputs, strict=True):
            if operand.requires_grad and operand.is_param and step.op_class is not OpClass.VIEW:
                found[walk.facts.roots.get(name, name)] = (
                    elements[operand.value] * operand.own_width
                )
    return found


def _entering(walk: Walk, left: Collection[str]) -> Iterator[tuple[str, int]]:
    tensors = walk.facts.graph.tensors
    for name in left:
        if tensors[name].requires_grad:
            yield walk.facts.roots[name], walk.nbytes(name, walk.placed[name])


def _freed_by(saved: Mapping[SavedKey, int], steps: Sequence[OpStep]) -> list[int]:
    """Per op, bytes that go when its backward has run: of what it was the first to save."""
    seen = set[SavedKey]()
    found = []
    for step in steps:
        own = {kept.key for kept in step.kept if kept.key} | {(step.op.name, "extra", ())}
        found.append(sum([saved.get(key, 0) for key in own - seen]))
        seen |= own
    return found
