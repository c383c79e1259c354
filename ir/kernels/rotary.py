"""Rotary position embedding: pairs of a head's halves are turned by angles of their position."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, make_rule
from meshwright.ir.launch import Build, block, jit, tl, triton, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, either_way, kernel_call


def reference(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [batch, heads, positions, 2 h]; cosine and sine: [batch or 1, positions, 2 h], whose
    halves are equal."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)


WIDTHS = (64, 128)
"""Heads whose machine code is read."""
HEADS = 4
"""That a program turns by the angles which it has read."""
TURNED = 1024
"""Pairs of a head at many positions, that it turns at once."""


@jit
def turn_kernel(
    x, cosine, sine, out, heads, positions, half, per_sample, sample_step, head_step, row_step,
    sign, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program turns some positions of some heads; with sign -1 back. `per_sample`: elements of
    the angles from sample to sample, 0 if all have the same. x has its own strides: heads are cut
    out of rows that hold all of them."""
    groups = tl.cdiv(heads, HEADS)
    sample, head = tl.program_id(1) // groups, (tl.program_id(1) % groups) * HEADS
    position = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (position < positions) & (at < half)
    angle = sample.to(tl.int64) * per_sample + position * 2 * half + at
    c = tl.load(cosine + angle, inside, 0.0).to(WIDE)
    s = tl.load(sine + angle, inside, 0.0).to(WIDE) * sign
    source = x + sample.to(tl.int64) * sample_step + position.to(tl.int64) * row_step + at
    to = out + (sample.to(tl.int64) * heads * positions + position) * 2 * half + at
    for each in tl.static_range(HEADS):
        there = (position < tl.where(head + each < heads, positions, 0)) & (at < half)
        here = source + (head + each).to(tl.int64) * head_step
        first = tl.load(here, there, 0.0).to(WIDE)
        second = tl.load(here + half, there, 0.0).to(WIDE)
        into = to + (head + each).to(tl.int64) * positions * 2 * half
        tl.store(into, (first * c - second * s).to(out.dtype.element_ty), there)
        tl.store(into + half, (second * c + first * s).to(out.dtype.element_ty), there)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    cosine, sine = cosine.contiguous(), sine.contiguous()
    if way("rotary", x, x.shape[-1]) == "torch":
        return reference(x.contiguous(), cosine, sine * sign)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, positions, size = x.shape
    out = x.new_empty(x.shape)
    rows = _rows(size // 2)
    turn_kernel[(triton.cdiv(positions, rows), batch * triton.cdiv(heads, HEADS))](
        x, cosine, sine, out, heads, positions, size // 2,
        positions * size if cosine.shape[0] > 1 else 0, *x.stride()[:3], sign,
        HEADS=HEADS, ROWS=rows, BLOCK=block(size // 2), WIDE=wide(x.dtype),
    )  # fmt: skip
    return out


def _rows(half: int) -> int:
    return max(1, TURNED // block(half))


@custom_op("meshwright::rotary", mutates_args=())
def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x turned by its positions' angles, which have no gradient."""
    return _turned(x, cosine, sine, 1.0)


@custom_op("meshwright::rotary_backward", mutates_args=())
def rotary_backward(grad: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The gradient is turned back."""
    return _turned(grad, cosine, sine, -1.0)


@rotary.register_fake
@rotary_backward.register_fake
def _shapes(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _differentiate(ctx, grad):
    return rotary_backward(grad, *ctx.saved_tensors), None, None


rotary.register_autograd(_differentiate, setup_context=_save)


ANCHORS = ("aten.add.Tensor",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    products = [flow.maker(op.args[key], "aten.mul.Tensor") for key in ("self", "other")]
    first, second = products
    if first is None or second is None or op.args["alpha"] != 1:
        return None
    for swapped, sine in either_way(second):
        turned = _halves_swapped(flow, swapped)
        if turned is None:
            continue
        x, calls = turned
        cosine = next((b for a, b in either_way(first) if a == x), None)
        angles = [_angle(flow, value) for value in (cosine, sine)]
        bad = next((angle for angle in angles if isinstance(angle, Miss)), None)
        if bad or len(flow.shape(x)) != 4:
            return bad or Miss("its heads are not [samples, heads, positions, size]")
        cos, sin = (angle for angle in angles if not isinstance(angle, Miss))
        given: dict[str, Arg] = {"x": x, "cosine": cos, "sine": sin}
        fused = kernel_call("rotary", given, op, list(op.outputs))
        return Match((first, *calls, second, op), fused, op)
    return None


def _halves_swapped(flow: Flow, value: Arg) -> tuple[Arg, tuple[RawOp, ...]] | None:
    """x and the calls of cat(-x[half:], x[:half])."""
    cat = flow.maker(value, "aten.cat.default")
    parts = cat.args["tensors"] if cat else ()
    if cat is None or not isinstance(parts, tuple) or len(parts) != 2:
        return None
    negated = flow.maker(parts[0], "aten.neg.default")
    second = flow.maker(negated.args["self"], "aten.slice.Tensor") if negated else None
    first = flow.maker(parts[1], "aten.slice.Tensor")
    if not (negated and first and second) or first.args["self"] != second.args["self"]:
        return None
    x, last = first.args["self"], len(flow.shape(first.args["self"])) - 1
    size = flow.shape(x)[-1]
    cuts = [tuple(cut.args[key] for key in ("dim", "start", "end", "step"))
            for cut in (first, second)]  # fmt: skip
    halves = [(last, 0, size // 2, 1), (last, size // 2, size, 1)]
    whole = cuts == halves and size % 2 == 0 and cat.args["dim"] in (-1, last)
    return (x, (first, second, negated, cat)) if whole else None


def _angle(flow: Flow, value: Arg) -> Arg | Miss:
    """[samples or 1, positions, size] of what is broadcast over heads."""
    opened = flow.maker(value, "aten.unsqueeze.default")
    if opened is None or opened.args["dim"] != 1 or len(flow.shape(value)) != 4:
        return Miss("its angles are not made for all heads at once")
    if flow.has_gradient(value):
        return Miss("its angles have a gradient")
    if not _halves_are_equal(flow, opened.args["self"]):
        return Miss("the halves of its angles may differ")
    return opened.args["self"]


def _halves_are_equal(flow: Flow, value: Arg) -> bool:
    """Whether it is made element by element of something that was laid twice side by side."""
    plain = ("aten.to.dtype", "aten.cos.default", "aten.sin.default", "aten.contiguous.default")
    while True:
        if op := flow.maker(value, *plain):
            value = op.args["self"]
        elif (op := flow.maker(value, "aten.mul.Tensor")) and not isinstance(op.args["other"], Ref):
            value = op.args["self"]
        else:
            break
    cat = flow.maker(value, "aten.cat.default")
    parts = cat.args["tensors"] if cat else ()
    last = len(flow.shape(value)) - 1
    return (
        cat is not None and isinstance(parts, tuple) and len(parts) == 2 and parts[0] == parts[1]
        and cat.args["dim"] in (-1, last)
    )  # fmt: skip


def _rule(op: Op, graph: Graph) -> Rule:
    """x[b, h, t, e] and angles [b or 1, t, e], whose gradients nobody wants."""
    x = (("b",), ("h",), ("t",), ("e",))
    angles = (("b",), ("t",), ("e",))
    return make_rule(op, graph, [x, angles, angles], [x], whole="e", linear=[{0}])


OPERATORS = {"rotary": (rotary, reference)}
FACTS = {
    "meshwright.rotary": OpFacts(rule=_rule, autocast="first", fused=True, torch_passes=5.0),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16, and heads of `width`."""
    half, nbytes, heads = width // 2, 4 if element == "fp32" else 2, 32
    values = {"heads": heads, "positions": 2048, "half": half, "per_sample": 2048 * width}
    values |= {"sample_step": 2048 * heads * width, "head_step": width, "row_step": heads * width}
    tensors = dict.fromkeys(("x", "cosine", "sine", "out"), f"*{element}")
    given = {**tensors, **dict.fromkeys(values, "i32"), "sign": "fp32"}
    constants = {"HEADS": HEADS, "ROWS": _rows(half), "BLOCK": block(half), "WIDE": tl.float32}
    pairs = _rows(half) * half * nbytes
    yield Build(
        turn_kernel, given, constants, values, moves=HEADS * 4 * pairs, cached=2 * pairs,
        filled=half / block(half),
    )  # fmt: skip
