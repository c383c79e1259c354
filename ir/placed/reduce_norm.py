"""An all-reduce before a residual sum and its norm: summed from the peers' memory, in one pass."""

from collections.abc import Iterator

from meshwright.ir.graph.graph import Op
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.placed.spots import KernelSpot, LaidBlock, Read

VIEWS = ("aten.view.default", "aten.reshape.default")
NORMS = ("meshwright.add_rms_norm.default", "meshwright.add_layer_norm.default")


def look(laid: LaidBlock) -> Iterator[KernelSpot]:
    """Norms of a sum one term of which is summands of the ranks of one axis."""
    reads = laid.reads()
    for op in laid.ops:
        if op.target not in NORMS:
            continue
        terms = [term for name in op.inputs[:2] if (term := _summed(reads, op, name))]
        if len(terms) > 1:
            yield KernelSpot(op, why="both terms are summands")
        elif terms:
            yield _spot(laid, reads, op, terms[0])


def _summed(reads: list[Read], op: Op, name: str) -> Read | None:
    """Where a term is all-reduced: as the norm reads it, or a view before."""
    for read in reads:
        own = read.op is op and read.name == name and read.index < 2
        viewed = read.op.target in VIEWS and name in read.op.outputs
        if (own or viewed) and any(c.forward is Primitive.ALL_REDUCE for _, c in read.moves):
            return read
    return None


def _spot(laid: LaidBlock, reads: list[Read], op: Op, read: Read) -> KernelSpot:
    only, via = read.only, None if read.op is op else read.op
    name = read.name if via is None else via.outputs[0]
    if only is None:
        return KernelSpot(op, why="what it adds is converted on several axes")
    if only[1].backward is not Primitive.IDENTITY:
        return KernelSpot(op, why="the gradient of its summands is converted too")
    if any(r.name in (name, read.name) and r.op not in (op, via) for r in reads):
        return KernelSpot(op, why="the sum of its summands is read elsewhere too")
    if {name, read.name} & laid.leaves():
        return KernelSpot(op, why="another block reads the sum of its summands")
    if via and any(r.moves for r in reads if r.op is op and r.name == name):
        return KernelSpot(op, why="what it adds is converted on several axes")
    return KernelSpot(op, *only, index=op.inputs.index(name), via=via)
