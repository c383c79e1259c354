"""GELU of a sum with a bias, by the error function or by tanh as GPT-2 has it, in one pass."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.op_forms import numbered, sharded, without
from meshwright.ir.graph.op_site import Form, OpSite
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule
from meshwright.ir.kernels.bias_gelu import dropout as dropping
from meshwright.ir.kernels.bias_gelu.share import kind, share_of
from meshwright.ir.kernels.gelu import tanh_gelu
from meshwright.ir.launch import (
    Build,
    block,
    held_dtype,
    jit,
    programs,
    tl,
    triton,
    way,
    wide,
)
from meshwright.ir.placed.peers import MOST_WIDTH
from meshwright.ir.trace.flat_trace import RawOp, make_op
from meshwright.ir.trace.flow import Flow, Match, Miss, kernel_call


def reference(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """x: [..., width], bias: [width]; the sum is not rounded, the result has x's dtype."""
    held = held_dtype(x.dtype)
    made = torch.nn.functional.gelu(x.to(held) + bias.to(held), approximate=kind(tanh))
    return made.to(x.dtype)


WIDTHS = (3_072, 4_096, 6_400, 16_384)
"""Inner widths of models, whose machine code is read."""
COLUMNS = 1024
"""Of a row, that a program holds at once."""
PER_PROCESSOR = 8
"""Programs of the backward."""
ROWS = 4
"""That a program goes over forward, with one read of the bias."""


@jit
def forward_kernel(
    x, bias, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(bias + at, at < width, 0.0).to(WIDE)
    for each in tl.static_range(ROWS):
        row = tl.program_id(0) * ROWS + each
        inside = at < tl.where(row < rows, width, 0)
        here = row.to(tl.int64) * width + at
        v = tl.load(x + here, inside, 0.0).to(WIDE) + added
        share, _ = share_of(v, TANH)
        tl.store(out + here, (v * share).to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad, x, bias, to_x, to_bias, rows,
    width, BLOCK: tl.constexpr, WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Each program sums the bias's gradient of its columns over its rows; the caller sums over
    programs."""
    first = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    added = tl.load(bias + at, inside, 0.0).to(WIDE)
    summed = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(first, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * width + at
        v = tl.load(x + here, inside, 0.0).to(WIDE) + added
        share, slope = share_of(v, TANH)
        back = tl.load(grad + here, inside, 0.0).to(WIDE) * (share + v * slope)
        summed += tl.where(inside, back, 0.0)
        tl.store(to_x + here, back.to(to_x.dtype.element_ty), inside)
    tl.store(to_bias + tl.cast(first, tl.int64) * width + at, summed, inside)


def _columns(width: int) -> tuple[int, int]:
    """That a program holds, and into how many such parts a row falls."""
    columns = min(COLUMNS, block(width))
    return columns, int(triton.cdiv(width, columns))


@custom_op("meshwright::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x + bias."""
    x, width = x.contiguous(), x.shape[-1]
    if way("bias_gelu", x, width) == "torch":
        return reference(x, bias, tanh)
    out, rows = torch.empty_like(x), x.numel() // width
    columns, parts = _columns(width)
    forward_kernel[(triton.cdiv(rows, ROWS), parts)](
        x, bias, out, rows, width, ROWS=ROWS, BLOCK=columns, WIDE=wide(x.dtype), TANH=tanh
    )
    return out


@bias_gelu.register_fake
def _shapes(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("meshwright::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    if way("bias_gelu", x, width) == "torch":
        held = held_dtype(x.dtype)
        total = x.to(held) + bias.to(held)
        back = torch.ops.aten.gelu_backward(grad.to(held), total, approximate=kind(tanh))
        return back.to(x.dtype), back.reshape(rows, width).sum(0).to(bias.dtype)
    to_x, (columns, parts) = torch.empty_like(x), _columns(width)
    # So many rows at once that their parts are as many programs as processors have room for.
    count = min(rows, triton.cdiv(PER_PROCESSOR * programs(x, rows, MOST_WIDTH), parts))
    partial = x.new_empty(count, width, dtype=held_dtype(x.dtype))
    backward_kernel[(count, parts)](
        grad, x, bias, to_x, partial, rows, width, BLOCK=columns, WIDE=wide(x.dtype), TANH=tanh
    )
    return to_x, partial.sum(0).to(bias.dtype)


@bias_gelu_backward.register_fake
def _backward_shapes(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.tanh = inputs[2]


def _differentiate(ctx, grad):
    return *bias_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


bias_gelu.register_autograd(_differentiate, setup_context=_save)


ANCHORS = ("aten.gelu.default", "aten.mul.Tensor")
AFTER = ("gelu",)
_PLAIN = {"aten.linear.default": "aten.linear.default", "aten.addmm.default": "aten.mm.default"}
"""A product with a bias -> the one without."""


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    found = _gelu(flow, op)
    view = flow.maker(found[0], "aten.view.default", "aten.reshape.default") if found else None
    product = flow.maker(view.args["self"] if view else found[0], *_PLAIN) if found else None
    bias = product.args["bias" if "bias" in product.args else "self"] if product else None
    if found is None or product is None or bias is None:
        return None
    if why := _why_not(flow, product, bias, found[0]):
        return Miss(why)
    _, tanh, calls = found
    before = _unbiased(flow, product, view)
    given: dict[str, Arg] = {"x": Ref(before[-1].outputs[0]), "bias": bias, "tanh": tanh}
    calls = (product, *([view] if view else []), *calls)
    if dropout := _dropout(flow, op):
        given |= {"p": dropout.args["p"], **_IN_ORDER}
        fused = kernel_call("bias_gelu_dropout", given, dropout, list(dropout.outputs))
        return Match((*calls, dropout), fused, dropout, before)
    return Match(calls, kernel_call("bias_gelu", given, op, list(op.outputs)), op, before)


_IN_ORDER: dict[str, Arg] = {"key": 0, "first": 0, "sizes": (-1,), "strides": (1,)}
"""What lowering replaces by the key of a step and by the numbers of what a rank has."""


def _dropout(flow: Flow, op: RawOp) -> RawOp | None:
    """What drops some of GELU's result, if nothing else reads it."""
    readers = flow.readers[op.outputs[0]]
    found = readers[0] if len(readers) == 1 else None
    if found is None or found.name != "aten.dropout.default" or op.outputs[0] == flow.raw.loss:
        return None
    p = found.args["p"]
    return found if found.args["train"] is True and isinstance(p, float) and 0 < p < 1 else None


def _gelu(flow: Flow, op: RawOp) -> tuple[Arg, bool, tuple[RawOp, ...]] | None:
    """What it is of, whether by tanh, and its calls."""
    if op.name == "aten.gelu.default":
        return op.args["self"], op.args["approximate"] == "tanh", (op,)
    written = tanh_gelu(flow, op)
    return (written[0], True, written[1]) if written else None


def _why_not(flow: Flow, product: RawOp, bias: Arg, x: Arg) -> str:
    if (product.args.get("alpha", 1), product.args.get("beta", 1)) != (1, 1):
        return "its product or bias is weighted"
    if flow.shape(bias) != flow.shape(x)[-1:]:
        return "its bias is no row of what it is of"
    return ""


def _unbiased(flow: Flow, product: RawOp, view: RawOp | None) -> tuple[RawOp, ...]:
    """The product without its bias, and the view of it."""
    name = _PLAIN[product.name]
    if name == product.name:
        plain = make_op(product.target, {**product.args, "bias": None}, product, [""])
    else:
        operands = {"self": product.args["mat1"], "mat2": product.args["mat2"]}
        plain = make_op(operator(name), operands, product, [""])
    plain = flow.with_example(plain)
    if view is None:
        return (plain,)
    given = {**view.args, "self": Ref(plain.outputs[0])}
    return plain, flow.with_example(make_op(view.target, given, view, [""]))


def _rule(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims, dims[-1:]], [dims])


OPERATORS = {"bias_gelu": (bias_gelu, reference)}


def _dropped(site: OpSite, form: Form) -> Form:
    """With the masks of the dropout that is part of it."""
    key = site.op.key.replace("/bias_gelu_dropout", "/dropout")
    plain = without(form, *_IN_ORDER, "held", "per_sample")
    shape = site.tensors[site.op.outputs[0]].shape
    return sharded(plain, "gelu_dropout", key=key, **numbered(site, shape))


_GELU = OpFacts(
    op_class=OpClass.TRANSCENDENTAL, rule=_rule, autocast="first", fused=True, torch_passes=2.0
)
FACTS = {
    "meshwright.bias_gelu": _GELU,
    "meshwright.bias_gelu_dropout": replace(_GELU, torch_passes=4.0, form=_dropped),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, columns = f"*{element}", _columns(width)[0]
    filled = width / (columns * _columns(width)[1])
    once = columns * filled * (4 if element == "fp32" else 2)
    for tanh in (False, True):
        constants = {"BLOCK": columns, "WIDE": tl.float32, "TANH": tanh}
        tensors = dict.fromkeys(("x", "bias", "out"), pointer)
        sizes, shape = dict.fromkeys(("rows", "width"), "i32"), {"width": width}
        yield Build(
            forward_kernel, {**tensors, **sizes}, {"ROWS": ROWS, **constants}, shape,
            moves=2 * ROWS * once, cached=once, filled=filled,
        )  # fmt: skip
        tensors = dict.fromkeys(("grad", "x", "bias", "to_x"), pointer)
        yield Build(
            backward_kernel, {**tensors, "to_bias": "*fp32", **sizes}, constants, shape,
            moves=3 * once, filled=filled, looped=True, most=PER_PROCESSOR,
        )  # fmt: skip
    yield from dropping.builds(element, width)
