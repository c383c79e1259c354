"""Products whose summands are scattered: each part leaves for its rank as soon as it is made."""

from collections.abc import Iterator

from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard
from meshwright.ir.placed.spots import KernelSpot, LaidBlock, Read

LINEAR = "aten.linear.default"


def look(laid: LaidBlock) -> Iterator[KernelSpot]:
    """Linears all of whose readers want the same part of the sum."""
    reads = laid.reads()
    for op in laid.ops:
        if op.target != LINEAR:
            continue
        readers = [read for read in reads if read.name == op.outputs[0]]
        if not any(c.forward is Primitive.REDUCE_SCATTER for r in readers for _, c in r.moves):
            continue
        own = next(read for read in reads if read.op is op and read.index == 0)
        if why := _why_not(laid, own, readers):
            yield KernelSpot(op, why=why)
        else:
            only = readers[0].only
            assert only
            yield KernelSpot(op, *only)


def _why_not(laid: LaidBlock, own: Read, readers: list[Read]) -> str:
    if any(c.forward is Primitive.ALL_GATHER for _, c in own.moves):
        return "it gathers what it reads"
    only = readers[0].only
    if only is None or any(read.moves != readers[0].moves for read in readers):
        return "those that read it want it in different ways"
    name, (axis, conversion) = readers[0].name, only
    target = conversion.target
    if name in laid.leaves():
        return "another block reads it"
    if not isinstance(target, Shard) or laid.axes[axis].shares:
        return "it scatters samples"
    if target.dim == len(laid.graph.tensors[name].shape) - 1:
        return "it scatters what the product makes of each row"
    if target.outer > 1:
        return "a rank gets several sections"
    if conversion.backward is not Primitive.ALL_GATHER:
        return "its gradient is not gathered"
    return ""
