"""What an op communicates inside, and keeps of what came: asked of its family."""

from meshwright.ir.graph.graph import Op
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import Inner, Operands, Passes
from meshwright.ir.ops import facts


def inner_traffic(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """What the op communicates on an axis of `ranks` on which it has this strategy.

    `inputs` and `outputs` are per `Op.inputs` and `Op.outputs`. Messages of the backward pass are
    those of an op whose inputs need gradients.
    """
    find = facts(op.target).messages
    split = any(isinstance(p, Shard) for p in strategy.inputs)
    return find(op, strategy, ranks, inputs, outputs) if find and split and ranks > 1 else ()


def inner_passes(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> Passes | None:
    """What our runtime moves in memory around the messages of an op that sends some."""
    find = facts(op.target).passes
    if find is None or not inner_traffic(op, strategy, ranks, inputs, outputs):
        return None
    return find(op, strategy, ranks, inputs, outputs)


def kept_apart(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> dict[int, int]:
    """Inputs of which the op's backward keeps a copy of its own, and the bytes of the copy on the
    busiest rank: what was fetched from others lies in other memory than the operand."""
    find = facts(op.target).copies
    if find is None or not inner_traffic(op, strategy, ranks, inputs, outputs):
        return {}
    return find(op, strategy, ranks, inputs, outputs)


def sends(op: Op) -> bool:
    """Whether the op communicates by itself under some strategy."""
    return facts(op.target).messages is not None
