"""What the forward of a block has at once: all that its ops have saved so far, and beside it what
the op that runs reads and makes."""

from collections.abc import Collection, Mapping

from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.block.reprice import OpStep, SavedKey
from meshwright.ir.cluster.device import OpClass


def forward_room(walk: Walk, saved: Mapping[SavedKey, int], entering: Collection[str]) -> int:
    """Returns the most bytes at once where all is kept. `saved`: what the block keeps, but of what
    enters it (`entering`), which is there anyway."""
    roots, elements = walk.facts.roots, walk.local.elements
    there = {roots.get(name, name) for name in entering}
    keys, kept, most = set[SavedKey](), 0, 0
    for step in (step for step in walk.script if isinstance(step, OpStep)):
        own = {tensor.key for tensor in step.kept if tensor.key} | {(step.op.name, "extra", ())}
        new = (own & saved.keys()) - keys
        kept += sum([saved[key] for key in new])
        keys |= new
        there |= {roots.get(key[0], key[0]) for key in new}
        if step.op_class is OpClass.VIEW:
            continue
        beside = {
            roots.get(name, name): elements[value] * width
            for name, value, width in [
                *((name, i.value, i.width)
                  for name, i in zip(step.op.inputs, step.inputs, strict=True) if not i.is_param),
                *((name, *made) for name, made in zip(step.op.outputs, step.outputs, strict=False)),
            ]
        }  # fmt: skip
        most = max(most, kept + sum([n for root, n in beside.items() if root not in there]))
    return most
