"""Keys under which measured times are kept: digests of all that a time depends on.

Of a block these are its ops at one rank's shapes, how they are wired, and the conversions between
them; not the model's name, the global batch, where in the model it stands, or how many replicas
there are.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from meshwright.costmodel.block.price_ops import PricedMove, PricedOp
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Arg, Op, Ref
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.ops import facts
from meshwright.ir.profile.profile import COMPILED

_SIZES = frozenset({
    "size", "shape", "sizes", "split_size", "split_sizes", "sizes_or_sections", "end", "length",
    "repeats", "self_size", "normalized_shape", "output_size",
})  # fmt: skip
"""Arguments that the shapes of operands and results tell already."""
_SCALARS = frozenset({"other", "value", "fill_value", "alpha", "beta", "eps", "scale"})
"""Arguments that change results and not times."""
_DIMS = frozenset({"dim", "dim0", "dim1", "dims"})
"""What a view's time may depend on, through the order in which its elements lie."""


def op_key(op: LocalOp) -> str:
    """Of one op at the shapes of one rank."""
    return _digest(_op_facts(op))


def block_key(
    trail: Iterable[PricedOp | PricedMove],
    precision: str,
    sizes: Mapping[str, int],
    *,
    compiled: bool = False,
) -> str:
    """Of the ops and conversions of a block, as a walk over it has found them.

    `sizes`: ranks of each axis.
    """
    numbers: dict[str, int] = {}
    facts: list[object] = [precision]
    for entry in trail:
        if isinstance(entry, PricedOp):
            facts.append(_step_facts(entry, numbers, sizes))
        elif not _is_nothing(entry):
            value = numbers.setdefault(entry.name, len(numbers))
            facts.append((value, entry.axis, str(entry.conversion), entry.size, entry.nbytes))
    return _digest(facts) + COMPILED * compiled


def _is_nothing(move: PricedMove) -> bool:
    conversion = move.conversion
    return conversion.forward is conversion.backward is Primitive.IDENTITY


def _step_facts(
    step: PricedOp, numbers: dict[str, int], sizes: Mapping[str, int]
) -> tuple[object, ...]:
    op = step.op
    wiring = [numbers.setdefault(name, len(numbers)) for name in (*op.inputs, *op.outputs) if name]
    split = [(a, str(s)) for a, s in step.strategies.items() if a != "dp" and sizes[a] > 1]
    summed = facts(op.target).by_batch and sizes["dp"] > 1
    # Blocks are measured with tokens drawn evenly: what is known of others is another block.
    routing = op.routing
    known = [routing] if routing and routing.source and (split or routing.drops) else []
    arguments = _arguments(op, step.local.op_class)
    return (*_op_facts(step.local), arguments, wiring, split, summed, *known)


def _op_facts(op: LocalOp) -> tuple[object, ...]:
    inputs = [(i.shape, i.nbytes, i.requires_grad, i.is_param, i.cast_bytes) for i in op.inputs]
    facts: tuple[object, ...] = (
        op.target,
        op.dtype,
        inputs,
        op.outputs,
        op.output_bytes,
        op.differentiable,
        op.causal,
    )
    if op.op_class is not classify(op.target):  # its arguments made it one of another class
        facts = (*facts, op.op_class.value)
    last = (op.channels_last, *(i.channels_last for i in op.inputs))
    return (*facts, last) if any(last) else facts


def _arguments(op: Op, op_class: OpClass) -> list[tuple[str, Arg]]:
    """The arguments that are no tensors."""
    if op_class is OpClass.VIEW:
        return [(name, value) for name, value in op.args if name in _DIMS]
    told = _SIZES | _SCALARS
    return [(name, _plain(value)) for name, value in op.args if name not in told]


def _plain(value: Arg) -> Arg:
    """Without names of tensors."""
    if isinstance(value, Ref):
        return "tensor"
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _digest(facts: object) -> str:
    return blake2b(repr(facts).encode(), digest_size=12).hexdigest()
