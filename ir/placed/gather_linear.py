"""Products of what is gathered first: each starts with the part that is there and goes on as the
others come."""

from collections.abc import Iterator

from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard
from meshwright.ir.placed.spots import KernelSpot, LaidBlock, Read

LINEAR = "aten.linear.default"


def look(laid: LaidBlock) -> Iterator[KernelSpot]:
    """Linears, those that read the same value together."""
    reads = laid.reads()
    done: set[str] = set()
    for read in reads:
        if read.op.target != LINEAR or read.index != 0 or read.name in done:
            continue
        if not any(c.forward is Primitive.ALL_GATHER for _, c in read.moves):
            continue
        done.add(read.name)
        why = _why_not(laid, read) or _others(laid, reads, read)
        if why:
            yield KernelSpot(read.op, why=why)
        else:
            # Others that read it do so as it lies.
            others = tuple(
                r.op for r in reads
                if (r.name, r.moves) == (read.name, read.moves) and r.op is not read.op
            )  # fmt: skip
            assert read.only
            yield KernelSpot(read.op, *read.only, others=others)


def _why_not(laid: LaidBlock, read: Read) -> str:
    if read.only is None:
        return "what it reads is converted on several axes"
    axis, conversion = read.only
    source = conversion.source
    assert isinstance(source, Shard)
    if laid.axes[axis].shares:
        return "it gathers samples"
    if source.dim == len(laid.graph.tensors[read.name].shape) - 1:
        return "it gathers what it sums over"
    if source.outer > 1:
        return "a rank has several sections of what is gathered"
    if conversion.backward is not Primitive.REDUCE_SCATTER:
        return "its gradient is not scattered"
    return ""


def _others(laid: LaidBlock, reads: list[Read], read: Read) -> str:
    """Everything that reads the value gathered has to be part of the call."""
    for other in reads:
        if other.name != read.name or other.op is read.op:
            continue
        if other.op.target != LINEAR or other.index != 0:
            if other.moves == read.moves:
                return f"what it gathers is read by {other.op.target} too"
        elif other.moves != read.moves:
            return "another product wants what it reads otherwise"
        elif not set(other.op.inputs[1:]) <= set(laid.block.params):
            return "another product of what it reads has a weight that is made later"
    return ""
