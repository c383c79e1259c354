"""What the forward of a block has at once: all that its ops have saved so far, what later ones will
read, and beside it what the op that runs reads and makes."""

from collections.abc import Collection, Mapping, Sequence

from meshwright.costmodel.block.moved_room import moved_forward
from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.block.reprice import MoveStep, OpStep, SavedKey
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Kind


def forward_room(
    walk: Walk,
    saved: Mapping[SavedKey, int],
    entering: Collection[str],
    again: Collection[str] = (),
) -> int:
    """Returns the most bytes at once. `saved`: what the block keeps, but of what enters it
    (`entering`), which is there anyway; `again`: keys of the ops that run again for the backward.
    """
    roots, elements = walk.facts.roots, walk.local.elements
    entered = frozenset([roots.get(name, name) for name in entering])
    there = {*entered}
    keys, kept, most = set[SavedKey](), 0, 0
    last, waiting, rooms = _last_read(walk, again), dict[str, int](), iter(walk.rooms)
    for number, step in enumerate(walk.script):
        if isinstance(step, MoveStep):
            most = max(most, kept + _moved_bytes(walk, step, there))
            continue
        room = next(rooms)
        own = {tensor.key for tensor in step.kept if tensor.key} | {(step.op.name, "extra", ())}
        new = (own & saved.keys()) - keys
        kept += sum([saved[key] for key in new])
        keys |= new
        # What an op keeps inside bears its name, as its result does, which is not kept with that.
        there |= {roots.get(key[0], key[0]) for key in new if key[1] in DTYPE_BYTES}
        if step.op_class is OpClass.VIEW:
            continue
        beside = dict[str, int]()
        for name, value, width in [
            *((name, i.value, i.own_width)
              for name, i in zip(step.op.inputs, step.inputs, strict=True) if not i.is_param),
            *((name, *made) for name, made in zip(step.op.outputs, step.outputs, strict=False)),
        ]:  # fmt: skip
            root = roots.get(name, name)  # of which all is there, though a view has some of it
            most_of_it = max(beside.get(root, 0), waiting.get(root, 0))
            beside[root] = max(most_of_it, elements[value] * width)
        at_once = {**waiting, **beside}
        others = sum([n for root, n in at_once.items() if root not in there])
        casts = _cast_bytes(step, elements, again)
        of_op = sum([n for root, n in beside.items() if root not in entered])
        most = max(most, kept + others + casts + room.ahead, of_op + casts + room.alone)
        made = {roots.get(name, name) for name in step.op.outputs if name}
        waiting |= {root: nbytes for root, nbytes in beside.items() if root in made}
        waiting = {root: n for root, n in waiting.items() if last.get(root, 0) > number}
    return most


def _cast_bytes(step: OpStep, elements: Sequence[int], again: Collection[str]) -> int:
    """Bytes of copies that autocast makes of what an op reads, and the op does not keep."""
    runs_again = step.op.key in again
    kept = {tensor.name for tensor in step.kept if tensor.key and not runs_again}
    return sum([
        elements[i.value] * i.width
        for name, i in zip(step.op.inputs, step.inputs, strict=True)
        if i.is_cast and i.width != i.own_width and name not in kept
    ])  # fmt: skip


def _last_read(walk: Walk, again: Collection[str]) -> dict[str, int]:
    """Value -> the last step that reads it: what an op that runs again reads of one that does not
    is held to the end."""
    roots, found, made_again = walk.facts.roots, dict[str, int](), set[str]()
    for number, step in enumerate(walk.script):
        if not isinstance(step, OpStep):
            continue
        is_again = step.op.key in again
        for name in filter(None, step.op.inputs):
            root = roots.get(name, name)
            held = is_again and root not in made_again
            found[root] = len(walk.script) if held else max(number, found.get(root, 0))
        if is_again:
            made_again |= {roots.get(name, name) for name in step.op.outputs if name}
    return found


def _moved_bytes(walk: Walk, step: MoveStep, there: Collection[str]) -> int:
    """Bytes that a conversion has, beside the values that are there anyway."""
    moved, name = moved_forward(walk, step), walk.facts.roots.get(step.name, step.name)
    if moved.is_same:
        return 0
    is_there = name in there or walk.facts.graph.tensors[step.name].kind is not Kind.ACTIVATION
    found = moved.before * (not is_there) + moved.after + moved.beside
    return found * DTYPE_BYTES[walk.facts.dtypes[step.name]]
