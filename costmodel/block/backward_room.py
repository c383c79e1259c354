"""What the backward of a block has at once beside what the block saved: gradients of values on
their way, less what ops have saved whose backward has run."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.block.reprice import OpStep, SavedKey
from meshwright.ir.cluster.device import OpClass


def backward_room(walk: Walk, saved: Mapping[SavedKey, int], left: Collection[str]) -> int:
    """Returns the most bytes that are there at once in the backward of what a walk has been
    through, beside all that was saved and gradients of parameters. `saved`: of it, what goes with
    the block; `left`: values that leave, whose gradients are there before."""
    ops = [step for step in walk.script if isinstance(step, OpStep)]
    pairs = [pair for pair in zip(ops, walk.rooms, strict=True) if pair[0].has_gradient]
    steps = [step for step, _ in pairs]
    roots, most, freed = walk.facts.roots, 0, 0
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
            most = max(most, max(sum(live.values()) + new + beside, least) - freed)
            for name in step.op.outputs:
                live.pop(roots.get(name, name), None)
            live |= {name: nbytes for name, nbytes in made.items() if name not in live}
        freed += freed_by[number]
    return most


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
