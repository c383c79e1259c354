"""What a stack hides that sends collectives of tensor parallelism in chunks beside the product that
reads or makes the value: in as many chunks as the group has ranks, all but one of them."""

from collections.abc import Iterable
from typing import TypeGuard

from meshwright.costmodel.block.overlap import Hidden, reads, slowing
from meshwright.costmodel.block.price_ops import PricedMove, PricedOp, Walk
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive


def in_chunks(walk: Walk) -> Hidden:
    """Returns what products hide of the collectives before and after them."""
    forward_s = backward_s = 0.0
    for index, move in enumerate(walk.trail):
        if not isinstance(move, PricedMove) or move.size == 1:
            continue
        makers = [s for s in walk.trail[:index] if _is_product(s) and move.name in s.op.outputs]
        users = [s for s in walk.trail[index + 1 :] if _is_product(s) and reads(s, move)]
        sent = move.conversion.forward, move.conversion.backward
        if users:
            forward_s += _hidden_s(walk, move, sent[0], (s.time.forward_s for s in users))
            weights = (s.time.backward_weight_s for s in users)
            backward_s += _hidden_s(walk, move, sent[1], weights)
            if walk.site.run_as.regathers and sent[0] is Primitive.ALL_GATHER:
                inputs = (s.time.backward_input_s for s in users)
                backward_s += _hidden_s(walk, move, sent[0], inputs)
        elif makers:
            forward_s += _hidden_s(walk, move, sent[0], (s.time.forward_s for s in makers))
            inputs = (s.time.backward_input_s for s in makers)
            backward_s += _hidden_s(walk, move, sent[1], inputs)
    return Hidden(forward_s, backward_s)


def _is_product(step: PricedOp | PricedMove) -> TypeGuard[PricedOp]:
    if not isinstance(step, PricedOp) or step.local.op_class is not OpClass.MATMUL:
        return False
    return any(operand.is_param for operand in step.local.inputs)


def _hidden_s(walk: Walk, move: PricedMove, primitive: Primitive, beside: Iterable[float]) -> float:
    if primitive is Primitive.IDENTITY:
        return 0.0
    sent_s = walk.site.primitive_s(primitive, move.nbytes, move.axis)
    hidden_s = min((1 - 1 / move.size) * sent_s, sum(beside))
    return hidden_s * max(0.0, 2.0 - slowing(walk, move).compute)
