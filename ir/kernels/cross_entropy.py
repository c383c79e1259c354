"""Cross-entropy over a vocabulary that may be split over ranks: logits are read once each way.

A rank's part of the vocabulary gives three numbers per token (`parts`); combined over ranks they
give the loss, and with them each rank makes its own part of the gradient (`gradient`). Neither
probabilities nor their logarithms are ever in memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.op_forms import own_classes
from meshwright.ir.graph.rules import Rule, make_rule
from meshwright.ir.launch import Build, held_dtype, jit, tl, triton, way, wide
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import FindMessages, Inner, Operands
from meshwright.ir.trace.flat_trace import RawOp, make_op
from meshwright.ir.trace.flow import Flow, Match, Miss, kernel_call

WIDTHS = (32_000, 50_257, 50_304)
"""Vocabularies whose machine code is read: Llama-2's, GPT-2's, and that made even."""
COLUMNS = 2048
"""Of a row, that a program holds at once."""


def reference(logits: Tensor, target: Tensor) -> Tensor:
    """Loss per token of logits [tokens, vocabulary]; 0 where the target is none of them."""
    wide_logits = logits.to(held_dtype(logits.dtype))
    known = (target >= 0) & (target < logits.shape[-1])
    picked = wide_logits.gather(-1, target.where(known, 0).unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(wide_logits, -1) - picked).where(known, 0.0)


@jit
def _row(logits, row, width, LANES: tl.constexpr):
    """Of a row: where it begins, elements before 16 divides an address, that address, and how many
    there are from it on in whole groups of 16 bytes. Rows of an odd width begin anywhere."""
    first = logits + row * width
    lead = (-first.to(tl.int64) % 16) // (16 // LANES)
    lead = tl.minimum(tl.where(lead < 0, lead + LANES, lead), width).to(tl.int32)
    return first, lead, tl.multiple_of(first + lead, 16), (width - lead) // LANES * LANES


@jit
def _edges(lead, inner, width, LANES: tl.constexpr):
    """The places before and after the whole groups, and which of them are some."""
    at = tl.arange(0, 2 * LANES)
    place = tl.where(at < LANES, at, lead + inner + at - LANES)
    return place, tl.where(at < LANES, at < lead, place < width)


@jit
def parts_kernel(
    logits, target, start, largest, total, picked, width, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """One program reads a row; each lane keeps its sum relative to its largest so far."""
    LANES: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    first, lead, whole, inner = _row(logits, row, width, LANES)
    place, there = _edges(lead, inner, width, LANES)
    edge = tl.load(first + place, there, float("-inf")).to(WIDE)
    own = tl.load(target + row) - start
    inside = (own >= 0) & (own < width)
    hit = tl.load(first + tl.where(inside, own, 0), inside, 0.0).to(WIDE)
    most = tl.full([BLOCK], float("-inf"), WIDE)
    sums = tl.zeros([BLOCK], WIDE)
    at = tl.arange(0, BLOCK)
    ahead = tl.load(whole + at, at < inner, float("-inf"))
    for begin in range(BLOCK, inner + BLOCK, BLOCK):
        value = ahead.to(WIDE)
        ahead = tl.load(whole + begin + at, begin + at < inner, float("-inf"))
        more = tl.maximum(most, value, propagate_nan=tl.PropagateNan.ALL)
        # Where nothing has come yet both are -inf, and so would their difference be no number.
        lost = tl.where(more == float("-inf"), 0.0, tl.exp(-tl.abs(value - most)))
        sums = tl.where(value > most, sums * lost + 1.0, sums + lost)
        most = more
    top = tl.maximum(tl.max(most, 0), tl.max(edge, 0))
    added = tl.sum(sums * tl.exp(most - top), 0) + tl.sum(tl.exp(edge - top), 0)
    tl.store(largest + row, top)
    tl.store(total + row, added)
    tl.store(picked + row, hit)


@jit
def _back(value, at, own, largest, inverse, weight, WIDE: tl.constexpr):
    """The gradient of some logits."""
    return (tl.exp(value.to(WIDE) - largest) * inverse - (at == own).to(WIDE)) * weight


@jit
def gradient_kernel(
    logits, target, start, largest, total, weight, out, width,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`logits` and `out` begin at addresses with one remainder by 16."""
    LANES: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    first, lead, whole, inner = _row(logits, row, width, LANES)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(whole + at, at < inner, float("-inf"))
    own, most = tl.load(target + row) - start, tl.load(largest + row)
    inverse, factor = 1.0 / tl.load(total + row), tl.load(weight + row)
    back = _back(value, lead + at, own, most, inverse, factor, WIDE)
    begin = out + row * width
    to = tl.multiple_of(begin + lead, 16)
    tl.store(to + at, back.to(out.dtype.element_ty), at < inner)
    if tl.program_id(1) == 0:
        place, there = _edges(lead, inner, width, LANES)
        edge = tl.load(first + place, there, float("-inf"))
        back_edge = _back(edge, place, own, most, inverse, factor, WIDE)
        tl.store(begin + place, back_edge.to(out.dtype.element_ty), there)


@custom_op("meshwright::cross_entropy_parts", mutates_args=())
def parts(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per token, of the columns from `start` on: the largest logit, the sum of exponents relative
    to it, and the target's logit, 0 if it is not among them."""
    logits, (tokens, width) = logits.contiguous(), logits.shape
    held = held_dtype(logits.dtype)
    if way("cross_entropy", logits) == "torch" or width == 0:
        return _parts_reference(logits.to(held), target - start)
    found = [logits.new_empty(tokens, dtype=held) for _ in range(3)]
    parts_kernel[(tokens,)](
        logits, target.contiguous(), start, *found, width,
        BLOCK=_columns(width), WIDE=wide(logits.dtype), num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _columns(width: int) -> int:
    return min(COLUMNS, int(triton.next_power_of_2(width)))


def _parts_reference(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not logits.shape[1]:
        nothing = logits.new_zeros(len(own))
        return torch.full_like(nothing, float("-inf")), nothing, nothing.clone()
    largest = logits.amax(1)
    total = (logits - largest.unsqueeze(1)).exp_().sum(1)
    inside = (own >= 0) & (own < logits.shape[1])
    picked = logits.gather(1, own.where(inside, 0).unsqueeze(1)).squeeze(1)
    return largest, total, picked.where(inside, 0.0)


@parts.register_fake
def _part_shapes(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    one = logits.new_empty(logits.shape[0], dtype=held_dtype(logits.dtype))
    return one, torch.empty_like(one), torch.empty_like(one)


def combined(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of all ranks as if one had the whole vocabulary."""
    largest = torch.stack([largest for largest, _, _ in found]).amax(0)
    total = sum(total * (own - largest).exp() for own, total, _ in found)
    picked = sum(picked for _, _, picked in found)
    assert isinstance(total, Tensor) and isinstance(picked, Tensor)
    return largest, total, picked


@custom_op("meshwright::cross_entropy_gradient", mutates_args=())
def gradient(
    logits: Tensor, target: Tensor, start: int, largest: Tensor, total: Tensor, weight: Tensor
) -> Tensor:
    """Of a rank's logits, given the combined parts; `weight` is the gradient of each token's loss,
    0 where a token does not count."""
    logits, (tokens, width) = logits.contiguous(), logits.shape
    if way("cross_entropy", logits) == "torch":
        back = (logits.to(total.dtype) - largest.unsqueeze(1)).exp_().div_(total.unsqueeze(1))
        own = target - start
        inside = (own >= 0) & (own < width)
        if width:
            less = -inside.to(back.dtype).unsqueeze(1)
            back.scatter_add_(1, own.where(inside, 0).unsqueeze(1), less)
        return back.mul_(weight.to(back.dtype).unsqueeze(1)).to(logits.dtype)
    out = torch.empty_like(logits)
    if (logits.data_ptr() - out.data_ptr()) % 16:
        logits = logits.clone()
    gradient_kernel[(tokens, triton.cdiv(width, _columns(width)))](
        logits, target.contiguous(), start, largest, total, weight.to(total.dtype), out, width,
        BLOCK=_columns(width), WIDE=wide(logits.dtype),
    )  # fmt: skip
    return out


@gradient.register_fake
def _gradient_shapes(
    logits: Tensor, target: Tensor, start: int, largest: Tensor, total: Tensor, weight: Tensor
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@custom_op("meshwright::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss per token where one rank has the whole vocabulary, as `reference`; and what its
    backward needs."""
    largest, total, picked = parts(logits, target, 0)
    known = (target >= 0) & (target < logits.shape[1])
    return (total.log() + largest - picked).where(known, 0.0), largest, total


@cross_entropy.register_fake
def _shapes(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    one = logits.new_empty(logits.shape[0], dtype=held_dtype(logits.dtype))
    return one, torch.empty_like(one), torch.empty_like(one)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad, *_):
    logits, target, largest, total = ctx.saved_tensors
    known = (target >= 0) & (target < logits.shape[1])
    return gradient(logits, target, 0, largest, total, grad.where(known, 0.0)), None


cross_entropy.register_autograd(_differentiate, setup_context=_save)


def total_reference(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The sum of the losses of tokens that are not ignored; no number if a target is no class."""
    legal = (target >= 0) & (target < logits.shape[-1]) | (target == ignore_index)
    return reference(logits, target).where(legal, float("nan")).sum()


def total_of(
    found: tuple[Tensor, Tensor, Tensor], target: Tensor, classes: int, ignore_index: int
) -> Tensor:
    """The same from the parts of all columns."""
    largest, total, picked = found
    ignored = target == ignore_index
    legal = (target >= 0) & (target < classes) | ignored
    loss = (total.log() + largest - picked).masked_fill(ignored, 0.0)
    return loss.where(legal, float("nan")).sum()


def total_gradient(
    grad: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor], start: int, ignore_index: int
) -> Tensor:
    """Of a rank's logits, columns from `start` on, given that of the sum; `saved` are the logits,
    the targets, and per token the largest logit and the sum relative to it."""
    logits, target, largest, total = saved
    weight = grad.expand(target.shape).masked_fill(target == ignore_index, 0.0).contiguous()
    back: Tensor = gradient(logits, target, start, largest, total, weight)
    return back


@custom_op("meshwright::cross_entropy_total", mutates_args=())
def cross_entropy_total(
    logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses of tokens that are not ignored, and what its backward needs."""
    found = parts(logits, target, 0)
    return total_of(found, target, logits.shape[1], ignore_index), found[0], found[1]


@cross_entropy_total.register_fake
def _total_shapes(
    logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    one, largest, total = _shapes(logits, target)
    return one.new_empty(()), largest, total


def _save_total(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.set_materialize_grads(False)
    ctx.ignore_index = inputs[2]
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_total(ctx, grad, *_):
    return total_gradient(grad, ctx.saved_tensors, 0, ctx.ignore_index), None, None


cross_entropy_total.register_autograd(_differentiate_total, setup_context=_save_total)


ANCHORS = ("meshwright.cross_entropy_sum.default",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    logits = op.args["logits"]
    if op.args["weight"] is not None or op.args["label_smoothing"]:
        return Miss("it weighs classes or smooths labels")
    if len(flow.shape(logits)) != 2:
        return Miss("its logits are not [tokens, classes]")
    read, replaced, before = _unwidened(flow, logits)
    given: dict[str, Arg] = {
        "logits": read, "target": op.args["target"], "ignore_index": op.args["ignore_index"],
    }  # fmt: skip
    fused = kernel_call("cross_entropy_total", given, op, [op.outputs[0], "", ""])
    return Match((*replaced, op), fused, op, before)


def _unwidened(flow: Flow, logits: Arg) -> tuple[Arg, tuple[RawOp, ...], tuple[RawOp, ...]]:
    """The logits before they were cast up for the loss, what did that, and what is called instead:
    the kernel sums in float32 whatever it reads."""
    view = flow.maker(logits, "aten.view.default", "aten.reshape.default")
    inner, casts = flow.uncast(view.args["self"] if view else logits)
    if not casts or not isinstance(inner, Ref) or not flow.is_widened(casts):
        return logits, (), ()
    if view is None:
        return inner, casts, ()
    again = flow.with_example(make_op(view.target, {**view.args, "self": inner}, view, [""]))
    return Ref(again.outputs[0]), (*casts, view), (again,)


def _rule(op: Op, graph: Graph) -> Rule:
    """logits[t, v] and labels[t] -> the sum, and per token what its backward needs, exchanged by
    ranks that split classes."""
    rows = (("t",),)
    inputs, outputs = [(*rows, ("v",)), rows], [(), rows, rows]
    return make_rule(op, graph, inputs, outputs, joined="v", plain="v")


def class_messages(index: int, dim: int) -> FindMessages:
    """What ranks tell each other of each token that have parts of the classes, a dim of an input:
    the largest logit, then the sum and the target's; nothing in backward."""

    def find(
        op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
    ) -> tuple[Inner, ...]:
        placed, row = strategy.inputs[index], outputs[1].nbytes
        if not isinstance(placed, Shard) or placed.dim != dim:
            return ()
        return (
            Inner(Primitive.ALL_REDUCE, row, 1, backward=False),
            Inner(Primitive.ALL_REDUCE, 2 * row, 1, backward=False),
        )

    return find


OPERATORS = {
    "cross_entropy": (cross_entropy, reference),
    "cross_entropy_total": (cross_entropy_total, total_reference),
}
FACTS = {
    "meshwright.cross_entropy_total": OpFacts(
        op_class=OpClass.NORMALIZATION,
        rule=_rule,
        fused=True,
        torch_passes=5.0,
        messages=class_messages(0, 1),
        form=own_classes("cross_entropy_total"),
    ),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For logits of `element`, such as bf16."""
    block, nbytes = _columns(width), 4 if element == "fp32" else 2
    constants = {"BLOCK": block, "WIDE": tl.float32}
    filled = width / (triton.cdiv(width, block) * block)
    given = {"logits": f"*{element}", "target": "*i64", "start": "i64"}
    known = {"largest": "*fp32", "total": "*fp32"}
    parts = {**given, **known, "picked": "*fp32", "width": "i32"}
    read, sizes = filled * block * nbytes, {"width": width}
    yield Build(parts_kernel, parts, constants, sizes, 8, moves=read, filled=filled, looped=True)
    last = {**given, **known, "weight": "*fp32", "out": f"*{element}", "width": "i32"}
    yield Build(gradient_kernel, last, constants, sizes, moves=2 * read, filled=filled)
