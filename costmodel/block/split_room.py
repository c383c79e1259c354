"""What the halves of a block's backward have at once, where it is split."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.block.reprice import OpStep, SavedKey
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
from meshwright.costmodel.block.weight_gradients import WeightGradients
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Block
from meshwright.ir.ops import facts


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
    roots, elements = of_gradients(walk, ops), walk.local.elements
    made_of = WeightGradients(walk, steps)
    frees = list(zip(freed_by(saved, steps), freed_by(leaving, steps), strict=True))
    leaves = Leaves(walk, steps, roots)
    live, moves = LiveGradients(entering(walk, left, roots)), moves_before(walk)
    given_bytes = first = live.nbytes
    # A half that runs all once more has all of the graph.
    joined = runs_again = any([room.halves and room.halves.runs_again for _, room in pairs])
    if runs_again:
        live.keeps_given()
    released, released_outputs, second, added = 0, 0, 0, 0
    graph, kept = set[str](), set[str]()
    turns: list[tuple[int, int, int]] = []
    for number in range(len(steps), -1, -1):
        first = max(first, moved_bytes(walk, live, moves[number], roots))
        if not number:
            break
        number -= 1
        step, room = pairs[number]
        beside, least, before, *_ = room
        halves, gathered = room.halves, room.gathered
        if step.op_class is not OpClass.VIEW or changes_size(step, elements):
            made, passed, new = made_by(walk, step, roots, live)
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
                whole = LiveGradients(())
                whole.comes(made_of.gathered(step))
                most = max(inside, before, moved_bytes(walk, whole, moves[number], roots))
                if facts(step.op.target).backward_inside:  # tokens' are made again, and go
                    most = max(most, inside + new)
                more = max(most - own - parts, narrow)
                joined, second = True, max(second, more)
                turns.append((made_of.place(step, block), own + parts, more))
                added = max(added, most, narrow + widest)
                live.keeps(results)
            live.goes(results, passed)
            back = cast_back(step, elements, lambda n: live.has(roots[n]))
            if apart := max(live.comes(made), back):
                first = max(first, live.with_kept_bytes + apart)
            leaves.have_read(step, live)
        if not joined:
            released += frees[number][0]
            released_outputs += frees[number][1]
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
