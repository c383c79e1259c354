"""Linear layers and experts whose products a precision has in 8-bit floats."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.ir.graph.expert_form import of_narrow
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.float8 import LINEARS, MULTIPLE
from meshwright.ir.graph.graph import Kind, Ref
from meshwright.ir.precision import Precision
from meshwright.ir.trace.flat_trace import Raw, RawOp, make_op


def narrow_products(raw: Raw, numbers: Precision) -> Raw:
    """Returns the step with these in the place of layers whose weight is a parameter of sizes that
    kernels take, and whose module has them. The last layer makes what the loss reads: it stays as
    it is, as in torchtitan's runs."""
    found = [op for op in raw.ops if _is_layer(raw, op)]
    mixed = [op for op in raw.ops if op.name == EXPERTS_TARGET and _fits(raw, op)]
    said = {id(op): numbers.at(_module_of(raw, op)) for op in found[:-1] + mixed}
    return replace(raw, ops=list(_swapped(raw, said)))


def _module_of(raw: Raw, op: RawOp) -> str:
    """That which has the weight, or the call where it is made of several."""
    weight = op.args["gate_up" if op.name == EXPERTS_TARGET else "weight"]
    assert isinstance(weight, Ref)
    tensor = raw.tensors.get(weight.name)
    return tensor.fqn.rpartition(".")[0] if tensor else op.path


def _is_layer(raw: Raw, op: RawOp) -> bool:
    weight = op.args.get("weight")
    if op.name != "aten.linear.default" or not isinstance(weight, Ref):
        return False
    tensor = raw.tensors.get(weight.name)
    if tensor is None or tensor.kind is not Kind.PARAMETER:
        return False
    return len(tensor.shape) == 2 and not any(size % MULTIPLE for size in tensor.shape)


def _fits(raw: Raw, op: RawOp) -> bool:
    """Whether kernels take all matrices of a layer of experts."""
    weights = [op.args[name] for name in ("gate_up", "up", "down")]
    shapes = [raw.fakes[x.name].shape for x in weights if isinstance(x, Ref)]
    return not any(size % MULTIPLE for shape in shapes for size in shape[1:])


def _swapped(raw: Raw, said: Mapping[int, Precision]) -> Iterator[RawOp]:
    """`said`: of ops by identity, the numbers of their modules."""
    for op in raw.ops:
        numbers = said.get(id(op))
        if not numbers or not numbers.linears:
            yield op
        elif op.name == EXPERTS_TARGET:
            form = of_narrow(op.args["form"], numbers.linears, numbers.narrow_tokens)
            yield replace(op, args={**op.args, "form": form})
        else:
            yield make_op(LINEARS[numbers.linears], op.args, op, op.outputs)
