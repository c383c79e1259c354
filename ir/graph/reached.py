"""Which parameters the loss gives a gradient: those that autograd reaches from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.ir.graph.graph import Kind, Tensor

Call = tuple[Sequence[str], Sequence[str]]
"""Names of the tensors that an op reads, and of those that it makes."""


def reached(calls: Iterable[Call], tensors: Mapping[str, Tensor], loss: str) -> frozenset[str]:
    """Names of the tensors on a differentiable way to the loss, itself included."""
    reads = {made: inputs for inputs, outputs in calls for made in outputs if made}
    found, open_ = {loss}, [loss]
    while open_:
        for name in reads.get(open_.pop(), ()):
            if name not in found and tensors[name].requires_grad:
                found.add(name)
                open_.append(name)
    return frozenset(found)


def only_reached(
    calls: Iterable[Call], tensors: Mapping[str, Tensor], loss: str
) -> dict[str, Tensor]:
    """The tensors, of whose parameters only those require a gradient that get one.

    PyTorch leaves the gradient of the others None, and its optimizers step over them.
    """
    kept = reached(calls, tensors, loss)
    return {
        name: replace(tensor, requires_grad=False)
        if tensor.kind is Kind.PARAMETER and tensor.requires_grad and name not in kept
        else tensor
        for name, tensor in tensors.items()
    }
