"""Cross-entropy of a last product, some rows at a time: its logits are never whole in memory.

Forward makes a chunk of rows' logits and takes the three numbers per token that cross-entropy goes
by; backward makes the chunk again, its gradient in it, and from that the part of both gradients. A
product more is the price; what is saved are the rows that go in, and two numbers for each. Where
ranks share the classes, each has its own columns (`codegen.sharded.vocabulary`). The products are
the library's; rows are so many at a time as make a chunk about as large as what goes in.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.gemm import matrix_products
from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import InnerCall, OpFacts, Shape
from meshwright.ir.graph.op_forms import own_classes
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.rules import Rule, make_rule
from meshwright.ir.kernels import cross_entropy as whole
from meshwright.ir.launch import held_dtype
from meshwright.ir.trace.flat_trace import RawOp, make_op
from meshwright.ir.trace.flow import Flow, Match, Miss, kernel_call

ROWS = 512
"""Of a chunk at least, if there are so many: fewer keep no device busy."""


def reference(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The sum of the losses of tokens that are not ignored: x [tokens, width], weight [classes,
    width]; no number if a target is no class."""
    logits = torch.nn.functional.linear(x, weight.to(x.dtype))
    return whole.total_reference(logits, target, ignore_index)


def rows_at_once(tokens: int, width: int, classes: int) -> int:
    """Rows of a chunk: its logits are as many as x has elements, unless that would be too few."""
    fair = -(-tokens * max(width, 1) // max(classes, 1))
    return max(1, min(tokens, max(fair, ROWS)))


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    tokens, width = x.shape
    step = rows_at_once(tokens, width, len(weight))
    yield from (slice(first, first + step) for first in range(0, tokens, step))


def parts(x: Tensor, weight: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per token, of the classes from `start` on, which the weight's rows are: what
    `cross_entropy.parts` says of their logits."""
    weight = weight.to(x.dtype)
    found = [whole.parts(x[at] @ weight.T, target[at], start) for at in _chunks(x, weight)]
    found = found or [whole.parts(x @ weight.T, target, start)]
    largest, total, picked = (torch.cat(part) for part in zip(*found, strict=True))
    return largest, total, picked


@custom_op("meshwright::linear_cross_entropy_gradient", mutates_args=())
def gradients(
    x: Tensor, weight: Tensor, target: Tensor, start: int, largest: Tensor, total: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of x, as far as these classes go, and of the weight, given the combined parts; `scale` is the
    gradient of each token's loss, 0 where a token does not count."""
    used, to_x = weight.to(x.dtype), torch.empty_like(x)
    to_weight = torch.zeros_like(weight, dtype=held_dtype(weight.dtype))
    for at in _chunks(x, used):
        logits = x[at] @ used.T
        back = whole.gradient(logits, target[at], start, largest[at], total[at], scale[at])
        torch.mm(back, used, out=to_x[at])
        if back.dtype == to_weight.dtype:
            to_weight.addmm_(back.T, x[at])
        else:
            to_weight += back.T @ x[at]
    return to_x, to_weight.to(weight.dtype)


@gradients.register_fake
def _gradient_shapes(
    x: Tensor, weight: Tensor, target: Tensor, start: int, largest: Tensor, total: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(weight)


def total_gradients(
    grad: Tensor, saved: Sequence[Tensor], start: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The same given the sum's gradient; `saved` are x, the weight, the targets, and per token the
    largest logit and the sum relative to it."""
    x, weight, target, largest, total = saved
    scale = grad.expand(target.shape).masked_fill(target == ignore_index, 0.0).contiguous()
    to_x, to_weight = gradients(x, weight, target, start, largest, total, scale)
    return to_x, to_weight


@custom_op("meshwright::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses as `reference`, and what its backward needs."""
    x = x.contiguous()
    found = parts(x, weight, target, 0)
    return whole.total_of(found, target, len(weight), ignore_index), found[0], found[1]


@linear_cross_entropy.register_fake
def _shapes(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    one = x.new_empty(x.shape[0], dtype=held_dtype(x.dtype))
    return one.new_empty(()), one, torch.empty_like(one)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].contiguous(), *inputs[1:3], *output[1:])
    ctx.ignore_index = inputs[3]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad, *_):
    return *total_gradients(grad, ctx.saved_tensors, 0, ctx.ignore_index), None, None


linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


_LOSSES = ("meshwright.cross_entropy_total.default", *whole.ANCHORS)
ANCHORS, AFTER = _LOSSES, ("cross_entropy",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    """A loss of logits that a product without a bias makes, and only the loss reads."""
    if op.args.get("weight") is not None or op.args.get("label_smoothing"):
        return Miss("it weighs classes or smooths labels")
    if len(flow.shape(op.args["logits"])) != 2:
        return Miss("its logits are not [tokens, classes]")
    found = _product(flow, op.args["logits"])
    if found is None:
        return None
    product, calls = found
    if product.args["bias"] is not None:
        return Miss("its product has a bias")
    x, before = _rows(flow, product)
    if flow.dtype(x) != flow.dtype(product.args["weight"]):
        return Miss("its product's operands differ in type")
    given: dict[str, Arg] = {
        "x": x, "weight": product.args["weight"], "target": op.args["target"],
        "ignore_index": op.args["ignore_index"],
    }  # fmt: skip
    outputs = [*op.outputs, "", ""][:3]
    fused = kernel_call("linear_cross_entropy", given, product, outputs)
    return Match((product, *calls, op), fused, op, before)


def _product(flow: Flow, logits: Arg) -> tuple[RawOp, tuple[RawOp, ...]] | None:
    """The product that makes the logits, and what views and widens them on the way."""
    calls: list[RawOp] = []
    while (step := flow.maker(logits, "aten.view.default", "aten.reshape.default")) or (
        (step := flow.maker(logits, "aten.to.dtype")) and flow.is_widened((step,))
    ):
        assert step is not None
        if flow.shape(logits)[-1:] != flow.shape(step.args["self"])[-1:]:
            return None
        calls.insert(0, step)
        logits = step.args["self"]
    product = flow.maker(logits, "aten.linear.default")
    return (product, tuple(calls)) if product else None


def _rows(flow: Flow, product: RawOp) -> tuple[Arg, tuple[RawOp, ...]]:
    """What the product reads as [tokens, width], and what is called to have it so."""
    x = product.args["input"]
    shape = flow.shape(x)
    if len(shape) == 2:
        return x, ()
    given: dict[str, Arg] = {"self": x, "shape": (torch.Size(shape[:-1]).numel(), shape[-1])}
    call = make_op(operator("aten.reshape.default"), given, product, [""])
    view = flow.with_example(call)
    return Ref(view.outputs[0]), (view,)


def _rule(op: Op, graph: Graph) -> Rule:
    """x[t, k], weight[v, k] and labels[t] -> the sum, and per token what its backward needs,
    exchanged by ranks that split classes; x's gradient is then a sum over them."""
    x, weight, rows = (("t",), ("k",)), (("v",), ("k",)), (("t",),)
    outputs = [(), rows, rows]
    inputs = [x, weight, rows]
    return make_rule(op, graph, inputs, outputs, whole="k", joined="v", plain="v", summed={0})


def _inside(shapes: Sequence[Shape]) -> tuple[int, int]:
    """All logits; and of a chunk the logits and their gradient."""
    (tokens, width), (classes, _) = shapes[:2]
    return tokens * classes, 2 * rows_at_once(tokens, width, classes) * classes


def _calls(shapes: Sequence[Shape]) -> tuple[InnerCall, ...]:
    """The product and its loss: chunks of it take as long as the whole."""
    (tokens, width), (classes, _) = shapes[:2]
    logits, product = (tokens, classes), "aten.linear.default"
    loss, count = "meshwright.cross_entropy_total.default", 2.0 * tokens * classes * width
    return (
        InnerCall(product, (0, 1), logits, count),
        InnerCall(loss, (logits, 2), (tokens,), 5.0 * tokens * classes),
    )


OPERATORS = {"linear_cross_entropy": (linear_cross_entropy, reference)}
FACTS = {
    "meshwright.linear_cross_entropy": OpFacts(
        op_class=OpClass.MATMUL,
        rule=_rule,
        flops=lambda args, of, out: 2 * of(args["x"])[0] * of(args["weight"])[0]
        * of(args["x"])[1],
        products=matrix_products(transposed=True),
        autocast="float32",
        inside=_inside,
        made_of=_calls,
        messages=whole.class_messages(1, 0),
        form=own_classes("linear_cross_entropy", 1, 0),
    ),
}  # fmt: skip
