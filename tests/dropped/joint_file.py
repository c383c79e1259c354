"""A product whose summands are summed at once: a kernel beside a collective, in one file.

A test copies it to a folder of a user's own under another name; NAME stands for that name.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.nn.functional import linear

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.joint import call_of, inputs_of, site_of
from meshwright.costmodel.ops.joint import JointPlace, JointTime, Price
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.placed.spots import KernelSpot, LaidBlock

OPERATORS = {}


def look(laid: LaidBlock) -> Iterator[KernelSpot]:
    reads = laid.reads()
    for op in laid.ops:
        readers = [read for read in reads if read.name == op.outputs[0]]
        only = readers[0].only if len({read.moves for read in readers}) == 1 else None
        if op.target != "aten.linear.default" or not only:
            continue
        if only[1].forward is not Primitive.ALL_REDUCE:
            continue
        why = "another block reads it" if op.outputs[0] in laid.leaves() else ""
        yield KernelSpot(op, *only, why=why)


def price(place: JointPlace) -> Price:
    """Half of the collective goes on beside the product."""
    (time,), sent_s = place.times(), place.sent_s(Primitive.ALL_REDUCE)
    separate_s = sent_s + time.forward_s
    forward = JointTime(separate_s, separate_s - sent_s / 2, sent_s)
    back = JointTime(time.backward_input_s, time.backward_input_s, 0.0)
    return place.price(forward, back, assumed=True)


def add(builder, spot, strategies) -> None:
    site = site_of(builder, spot.op, strategies)
    args = tuple(inputs_of(builder, site, -1))
    node = call_of(builder, "NAME", spot, args, spot.conversion.backward)
    layout = {**site.output_layout(0), spot.axis: spot.conversion.target}
    builder.made_as(spot.op.outputs[0], node, layout)


def run(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: str) -> Tensor:
    return comm.all_reduce(linear(x, weight, bias), axis, "identity")
