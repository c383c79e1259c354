"""Copies that autocast makes of a moved value, where the products that read it are one call."""

from dataclasses import replace

from meshwright.costmodel.block.overlap import columns
from meshwright.costmodel.block.price_ops import PricedMove, Walk
from meshwright.costmodel.block.reprice import OpStep, SavedKey


def casts_once(walk: Walk) -> None:
    """Changes what a walk has saved: autocast has one copy of a moved value for all products that
    are one call, where it would make one for each of them."""
    users = {
        step.op.name: (index, move.name)
        for index, move in enumerate(walk.trail)
        if isinstance(move, PricedMove) and move.size > 1
        for step in columns(walk, index, move)
    }
    first: dict[tuple[int, str], SavedKey] = {}
    for number, step in enumerate(walk.script):
        if not isinstance(step, OpStep) or step.op.name not in users:
            continue
        kept, moved = [], users[step.op.name]
        for each in step.kept:
            if each.key and not each.key[2] and each.name == moved[1]:
                key = first.setdefault(moved, each.key)
                if key != each.key:
                    walk.saved.pop(each.key, None)
                each = replace(each, key=key)
            kept.append(each)
        walk.script[number] = replace(step, kept=tuple(kept))
