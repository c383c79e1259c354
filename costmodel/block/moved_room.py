"""What a conversion has at once: the value before and after it, and what is made on the way
(`codegen.collectives.primitives`)."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.block.reprice import MoveStep
from meshwright.costmodel.block.site import USUAL
from meshwright.ir.layout.conversions import Primitive, dual
from meshwright.ir.layout.layout import Placement, Shard


class MovedSizes(NamedTuple):
    """Elements of a value on a rank."""

    before: int
    after: int
    beside: int
    """Most that is made on the way, beside the two; 0: nothing is made at all."""
    is_same: bool
    """Whether what comes out is what went in."""


def moved_forward(walk: Walk, step: MoveStep) -> MovedSizes:
    """Returns what a conversion has of the value, in the forward."""
    conversion = step.conversion
    return _moved(
        walk, step, conversion.forward, (conversion.source, conversion.target),
        (step.before, step.after),
    )  # fmt: skip


def moved_back(walk: Walk, step: MoveStep) -> MovedSizes:
    """Returns what a conversion has of the gradient of the value, in the backward."""
    conversion = step.conversion
    ends = dual(conversion.target), dual(conversion.source)
    return _moved(walk, step, conversion.backward, ends, (step.after, step.before))


def _moved(
    walk: Walk,
    step: MoveStep,
    primitive: Primitive,
    ends: tuple[Placement, Placement],
    values: tuple[int, int],
) -> MovedSizes:
    line, elements = walk.site.axes[step.axis], walk.local.elements
    before, after = elements[values[0]], elements[values[1]]
    if line.size == 1 or primitive is Primitive.IDENTITY:
        return MovedSizes(before, after, 0, True)
    beside = 0
    if walk.site.run_as is USUAL:
        on_cpu = walk.site.device.kind == "cpu"
        beside = _on_the_way(primitive, ends, (before, after), line.size, on_cpu)
    return MovedSizes(before, after, beside, False)


def _on_the_way(
    primitive: Primitive,
    ends: tuple[Placement, Placement],
    sizes: Sequence[int],
    ranks: int,
    on_cpu: bool,
) -> int:
    """Elements beside what goes in and what comes out, at most."""
    before, after = sizes
    source, target = [isinstance(end, Shard) and end.zigzag for end in ends]
    match primitive:
        case Primitive.ALL_GATHER:
            # All parts as they come, the whole that they are put together to, and of a zigzag every
            # second section the other way round.
            return after + (after + after // 2) * source
        case Primitive.REDUCE_SCATTER:
            # Its parts, one after the other, and processes on CPUs get what the others have of
            # theirs; of a zigzag, what these are cut from.
            received = before + after * (ranks - 1) * on_cpu
            return max(received, (2 * before - after) * target)
        case Primitive.PAD:
            return (after + after // 2) * source
        case Primitive.ALL_TO_ALL:
            if _dim(ends[0]) == _dim(ends[1]):  # gathered, and cut
                whole = before * ranks
                return 2 * whole + (whole + whole // 2) * source
            # What goes and what comes, each in one piece, and of a zigzag as above.
            return 2 * before + (after + after // 2) * source
        case _:
            return 0


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None
