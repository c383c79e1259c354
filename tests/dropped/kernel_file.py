"""The square of what a rectifier lets through, in one pass: a fused kernel in one file.

A test copies it to a folder of a user's own under another name; NAME stands for that name.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts, per_element
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule
from meshwright.ir.launch import ELEMENTS, Build, grid, jit, tl, way
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, kernel_call


def reference(x: Tensor) -> Tensor:
    return torch.relu(x) * torch.relu(x)


@jit
def forward_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    held = tl.load(x + at, inside, 0.0)
    passed = tl.where(held > 0, held, 0.0)
    tl.store(out + at, (passed * passed).to(out.dtype.element_ty), inside)


@custom_op("meshwright::NAME", mutates_args=())
def forward(x: Tensor) -> Tensor:
    if way("NAME", x) == "torch":
        return reference(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    forward_kernel[grid(x)](x, out, x.numel(), BLOCK=ELEMENTS)
    return out


@forward.register_fake
def _shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx, grad):
    (x,) = ctx.saved_tensors
    return 2 * grad * torch.relu(x)


forward.register_autograd(_differentiate, setup_context=_save)
ANCHORS = ("aten.pow.Tensor_Scalar",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    rectified = flow.maker(op.args["self"], "aten.relu.default")
    if rectified is None:
        return None
    if op.args["exponent"] != 2:
        return Miss("its exponent is not 2")
    call = kernel_call("NAME", {"x": rectified.args["self"]}, op, [op.outputs[0]])
    return Match((rectified, op), call, op)


def _rule(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims], [dims])


OPERATORS = {"NAME": (forward, reference)}
FACTS = {
    "meshwright.NAME": OpFacts(
        op_class=OpClass.TRANSCENDENTAL,
        rule=_rule,
        flops=per_element(3),
        autocast="first",
        fused=True,
        torch_passes=1.5,
    )
}


def builds(element: str, width: int) -> Iterator[Build]:
    types = {"x": f"*{element}", "out": f"*{element}", "count": "i32"}
    yield Build(forward_kernel, types, {"BLOCK": ELEMENTS})
