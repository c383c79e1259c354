"""Which parameters the loss gives a gradient: those that autograd reaches from it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.ir.graph import Kind, Op, Tensor


def reached(ops: Iterable[Op], tensors: Mapping[str, Tensor], loss: str) -> frozenset[str]:
    """Names of the tensors on a differentiable way to the loss, itself included."""
    producer = {out: op for op in ops for out in op.outputs if out}
    found, open_ = {loss}, [loss]
    while open_:
        op = producer.get(open_.pop())
        for name in op.inputs if op else ():
            if name not in found and tensors[name].requires_grad:
                found.add(name)
                open_.append(name)
    return frozenset(found)


def only_reached(
    ops: Iterable[Op], tensors: Mapping[str, Tensor], loss: str
) -> dict[str, Tensor]:
    """The tensors, of whose parameters only those require a gradient that get one.

    PyTorch leaves the gradient of the others None, and its optimizers step over them.
    """
    kept = reached(ops, tensors, loss)
    return {
        name: replace(tensor, requires_grad=False)
        if tensor.kind is Kind.PARAMETER and tensor.requires_grad and name not in kept
        else tensor
        for name, tensor in tensors.items()
    }
