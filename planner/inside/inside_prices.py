"""What an op's own communication costs the layout solver."""

from math import ceil
from typing import NamedTuple

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.inner_traffic import inner_passes, inner_traffic
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Strategy
from meshwright.ir.layout.op_messages import SHIFT, Inner, LocalOperand
from meshwright.planner.inside.prices import Prices


class Inside(NamedTuple):
    """Seconds of messages inside an op, forward and backward, and of moving for them in memory."""

    beside: float
    """While it computes."""
    alone: float

    def with_compute(self, computing_s: float) -> float:
        """Seconds of the op as a whole."""
        return max(computing_s, self.beside) + self.alone


def inside_s(
    graph: Graph, op: Op, strategy: Strategy, ranks: int, prices: Prices, samples: float = 1.0
) -> Inside:
    """Messages inside an op on an axis of `ranks` for so many samples, which go together; nothing
    for most ops."""
    inputs = [_operand(graph, name) for name in op.inputs]
    outputs = [_operand(graph, name) if name else LocalOperand((), 0) for name in op.outputs]
    messages = inner_traffic(op, strategy, ranks, inputs, outputs)
    trains = any(name and graph.tensors[name].requires_grad for name in op.outputs)
    seconds = [0.0, 0.0]
    for message in messages:
        if trains or not message.backward:
            seconds[message.beside and prices.hides] += _message_s(
                message, samples / graph.batch_size, ranks, prices
            )
    if passes := inner_passes(op, strategy, ranks, inputs, outputs):
        moved = passes.forward_bytes + passes.backward_bytes * trains
        seconds[False] += prices.packed_s(moved * samples / graph.batch_size)
    return Inside(beside=seconds[True], alone=seconds[False])


def _operand(graph: Graph, name: str) -> LocalOperand:
    tensor = graph.tensors[name]
    return LocalOperand(tensor.shape, tensor.nbytes)


def _message_s(message: Inner, share: float, ranks: int, prices: Prices) -> float:
    nbytes = ceil(message.nbytes * share)
    if message.kind == SHIFT:
        # A gather is ranks - 1 shifts of a part each.
        gather_s = prices.primitive_s(Primitive.ALL_GATHER, nbytes * ranks, ranks)
        return message.times * gather_s / (ranks - 1)
    times = message.times * message.crowd
    return times * prices.primitive_s(Primitive(message.kind), nbytes, ranks)
