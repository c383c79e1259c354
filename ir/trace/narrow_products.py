"""Linear layers whose products a precision has in 8-bit floats."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.graph.float8 import LINEARS, MULTIPLE
from meshwright.ir.graph.graph import Kind, Ref
from meshwright.ir.precision import Precision
from meshwright.ir.trace.flat_trace import Raw, RawOp, make_op


def narrow_products(raw: Raw, numbers: Precision) -> Raw:
    """Returns the step with these in the place of layers whose weight is a parameter of sizes that
    kernels take, and whose module has them. The last one makes what the loss reads: it stays as it
    is, as in torchtitan's runs."""
    found = [op for op in raw.ops if _is_layer(raw, op)]
    narrow = {id(op) for op in found[:-1] if numbers.at(_module_of(raw, op)).linears}
    return replace(raw, ops=list(_swapped(raw, narrow, numbers.linears)))


def _module_of(raw: Raw, op: RawOp) -> str:
    weight = op.args["weight"]
    assert isinstance(weight, Ref)
    return raw.tensors[weight.name].fqn.rpartition(".")[0]


def _is_layer(raw: Raw, op: RawOp) -> bool:
    weight = op.args.get("weight")
    if op.name != "aten.linear.default" or not isinstance(weight, Ref):
        return False
    tensor = raw.tensors.get(weight.name)
    if tensor is None or tensor.kind is not Kind.PARAMETER:
        return False
    return len(tensor.shape) == 2 and not any(size % MULTIPLE for size in tensor.shape)


def _swapped(raw: Raw, narrow: set[int], scaling: str) -> Iterator[RawOp]:
    for op in raw.ops:
        if id(op) in narrow:
            yield make_op(LINEARS[scaling], op.args, op, op.outputs)
        else:
            yield op
