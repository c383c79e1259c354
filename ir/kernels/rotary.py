"""Rotary position embedding: pairs of a head's halves are turned by angles of their position."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, make_rule
from meshwright.ir.launch import Build, block, jit, tl, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, either_way, kernel_call


def reference(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [batch, heads, positions, 2 h]; cosine and sine: [batch or 1, positions, 2 h], whose
    halves are equal."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)


@jit
def turn_kernel(
    x, cosine, sine, out, heads, positions,
    half, per_sample, sign, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program turns a position of a head; with sign -1 back. `per_sample`: elements of the
    angles from sample to sample, 0 if all have the same."""
    row = tl.program_id(0).to(tl.int64)
    position = row % positions
    sample = row // (positions * heads)
    at = tl.arange(0, BLOCK)
    inside = at < half
    angle = sample * per_sample + position * 2 * half + at
    c = tl.load(cosine + angle, inside, 0.0).to(WIDE)
    s = tl.load(sine + angle, inside, 0.0).to(WIDE) * sign
    here = row * 2 * half + at
    first = tl.load(x + here, inside, 0.0).to(WIDE)
    second = tl.load(x + here + half, inside, 0.0).to(WIDE)
    tl.store(out + here, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(out + here + half, (second * c + first * s).to(out.dtype.element_ty), inside)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    x, cosine, sine = x.contiguous(), cosine.contiguous(), sine.contiguous()
    if way("rotary", x, x.shape[-1]) == "torch":
        return reference(x, cosine, sine * sign)
    batch, heads, positions, size = x.shape
    out = torch.empty_like(x)
    turn_kernel[(batch * heads * positions,)](
        x, cosine, sine, out, heads, positions, size // 2,
        positions * size if cosine.shape[0] > 1 else 0, sign,
        BLOCK=block(size // 2), WIDE=wide(x.dtype), num_warps=1,
    )  # fmt: skip
    return out


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
    sizes = dict.fromkeys(("heads", "positions", "half", "per_sample"), "i32")
    tensors = dict.fromkeys(("x", "cosine", "sine", "out"), f"*{element}")
    constants = {"BLOCK": block(width // 2), "WIDE": tl.float32}
    yield Build(turn_kernel, {**tensors, **sizes, "sign": "fp32"}, constants)
