"""SwiGLU's product: silu(gate) * up, one pass each way, nothing kept but its inputs."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule
from meshwright.ir.launch import ELEMENTS, Build, grid, jit, tl, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, either_way, kernel_call


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Of tensors of one shape."""
    return torch.nn.functional.silu(gate) * up


@jit
def forward_kernel(gate, up, out, count, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, inside, 0.0).to(WIDE)
    u = tl.load(up + at, inside, 0.0).to(WIDE)
    made = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + at, made.to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad, gate, up, to_gate, to_up, count,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, inside, 0.0).to(WIDE)
    g = tl.load(gate + at, inside, 0.0).to(WIDE)
    u = tl.load(up + at, inside, 0.0).to(WIDE)
    share = 1.0 / (1.0 + tl.exp(-g))
    slope = share * (1.0 + g * (1.0 - share))
    tl.store(to_gate + at, (d * u * slope).to(to_gate.dtype.element_ty), inside)
    tl.store(to_up + at, (d * g * share).to(to_up.dtype.element_ty), inside)


@custom_op("meshwright::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    if way("swiglu", gate) == "torch":
        return reference(gate, up)
    out = torch.empty_like(gate)
    forward_kernel[grid(gate)](gate, up, out, gate.numel(), BLOCK=ELEMENTS, WIDE=wide(gate.dtype))
    return out


@swiglu.register_fake
def _shapes(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@custom_op("meshwright::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    if way("swiglu", gate) == "torch":
        share = torch.sigmoid(gate)
        return grad * up * share * (1 + gate * (1 - share)), grad * gate * share
    to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
    backward_kernel[grid(gate)](
        grad, gate, up, to_gate, to_up, gate.numel(), BLOCK=ELEMENTS, WIDE=wide(gate.dtype)
    )
    return to_gate, to_up


@swiglu_backward.register_fake
def _backward_shapes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(gate, memory_format=torch.contiguous_format),
        torch.empty_like(up, memory_format=torch.contiguous_format),
    )


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    return swiglu_backward(grad, *ctx.saved_tensors)


swiglu.register_autograd(_differentiate, setup_context=_save)


ANCHORS = ("aten.mul.Tensor",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    for gated, up in either_way(op):
        silu = flow.maker(gated, "aten.silu.default")
        if silu is None:
            continue
        if flow.shape(up) != flow.shape(gated):
            return Miss("the other factor is broadcast")
        given = {"gate": silu.args["self"], "up": up}
        return Match((silu, op), kernel_call("swiglu", given, op, [op.outputs[0]]), op)
    return None


def _rule(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims, dims], [dims], linear=[{1}])


OPERATORS = {"swiglu": (swiglu, reference)}
FACTS = {
    "meshwright.swiglu": OpFacts(
        op_class=OpClass.TRANSCENDENTAL, rule=_rule, fused=True, torch_passes=1.7
    ),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, constants = f"*{element}", {"BLOCK": ELEMENTS, "WIDE": tl.float32}
    once, size = ELEMENTS * (4 if element == "fp32" else 2), {"count": 16 * width}
    names = dict.fromkeys(("gate", "up", "out"), pointer)
    yield Build(forward_kernel, {**names, "count": "i64"}, constants, size, moves=3 * once)
    back = dict.fromkeys(("grad", "gate", "up", "to_gate", "to_up"), pointer)
    yield Build(backward_kernel, {**back, "count": "i64"}, constants, size, moves=5 * once)
