"""What calls make of where they are in training: which samples of the batch they have."""

from collections.abc import Callable, Iterator, Mapping

from torch import fx

from meshwright.codegen.attention.dropped import attention
from meshwright.codegen.lower.program import Call
from meshwright.codegen.sharded.dropout import dropout, gelu_dropout
from meshwright.ir.layout.conversions import Primitive

_DRAW: Mapping[Callable[..., object], str] = {
    dropout: "key", gelu_dropout: "key", attention: "name",
}  # fmt: skip
"""Functions that draw numbers by place, and which argument names their op."""
Drawn = tuple[str, str, int]
"""A block, an op of it, and how many numbers its samples have each: parameters of `Comm.held`."""


def drawn(call: Call) -> Iterator[Drawn]:
    """Yields ops of a call whose numbers begin where a device may say."""
    for node in call.code.module.graph.nodes:
        if node.op == "call_function" and (name := _DRAW.get(node.target)):
            yield call.block, node.kwargs[name], node.kwargs.get("per_sample", 0)


def reads_place(call: Call) -> bool:
    """Whether the host computes with which samples a call has, or which micro-batch it is."""
    return any(map(_reads_place, call.code.module.graph.nodes))


def _reads_place(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _DRAW:
        return False
    per_sample = node.kwargs.get("per_sample", 0)
    steps = per_sample if isinstance(per_sample, tuple) else (per_sample,)
    said = {x for x in (node.target, *node.args, *node.kwargs.values()) if isinstance(x, str)}
    return any(map(bool, steps)) or ("dp" in said and str(Primitive.MASK) in said)
