"""Rotary position embedding: pairs of a head's halves are turned by angles of their position."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.graph.graph import Arg, Graph, Op, Ref
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, input_shapes, make_rule
from meshwright.ir.launch import Build, block, jit, tl, triton, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, either_way, kernel_call


def reference(x: Tensor, cosine: Tensor, sine: Tensor, paired: bool = False) -> Tensor:
    """x: [batch, heads, positions, 2 h], whose halves are turned, or, if `paired`, even places with
    odd ones; the result has halves. cosine and sine: [batch or 1, positions, h], or that twice side
    by side."""
    first, second = (x[..., ::2], x[..., 1::2]) if paired else x.chunk(2, -1)
    half = first.shape[-1]
    cos, sin = cosine[..., :half].unsqueeze(1), sine[..., :half].unsqueeze(1)
    made = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return made.to(x.dtype)


WIDTHS = (64, 128)
"""Heads whose machine code is read."""
HEADS = 4
"""That a program turns by the angles which it has read."""
TURNED_BYTES = 2048
"""Of halves of a head at many positions, that it turns at once: 16 of each thread."""


@jit
def turn_kernel(
    x, cosine, sine, out, heads, positions, half, per_sample, per_row, sample_step, head_step,
    row_step, sign, READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program turns some positions of some heads; with sign -1 back. `per_sample`: elements of
    the angles from sample to sample, 0 if all have the same; `per_row`: from position to position.
    x has its own strides: heads are cut out of rows that hold all of them."""
    groups = tl.cdiv(heads, HEADS)
    sample, head = tl.program_id(1) // groups, (tl.program_id(1) % groups) * HEADS
    position = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    at, pair = tl.arange(0, BLOCK)[None, :], tl.arange(0, 2 * BLOCK)[None, :]
    inside = (position < positions) & (at < half)
    angle = sample.to(tl.int64) * per_sample + position * per_row + at
    c = tl.load(cosine + angle, inside, 0.0).to(WIDE)
    s = tl.load(sine + angle, inside, 0.0).to(WIDE) * sign
    source = x + sample.to(tl.int64) * sample_step + position.to(tl.int64) * row_step
    to = out + (sample.to(tl.int64) * heads * positions + position) * 2 * half
    for each in tl.static_range(HEADS):
        rows = position < tl.where(head + each < heads, positions, 0)
        there, whole = rows & (at < half), rows & (pair < 2 * half)
        here = source + (head + each).to(tl.int64) * head_step
        if READS_PAIRS:
            both = tl.load(here + pair, whole, 0.0)
            first, second = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
        else:
            first = tl.load(here + at, there, 0.0)
            second = tl.load(here + half + at, there, 0.0)
        first, second = first.to(WIDE), second.to(WIDE)
        turned = (first * c - second * s).to(out.dtype.element_ty)
        beside = (second * c + first * s).to(out.dtype.element_ty)
        into = to + (head + each).to(tl.int64) * positions * 2 * half
        if WRITES_PAIRS:
            tl.store(into + pair, tl.reshape(tl.join(turned, beside), [ROWS, 2 * BLOCK]), whole)
        else:
            tl.store(into + at, turned, there)
            tl.store(into + half + at, beside, there)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: float, paired: bool) -> Tensor:
    """Forward from pairs, backward, with sign -1, to pairs."""
    cosine, sine = cosine.contiguous(), sine.contiguous()
    if way("rotary", x, x.shape[-1]) == "torch":
        return _turned_by_torch(x.contiguous(), cosine, sine * sign, sign, paired)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, positions, size = x.shape
    out = x.new_empty(x.shape)
    rows, per_row = _rows(size // 2, x.element_size()), cosine.shape[-1]
    turn_kernel[(triton.cdiv(positions, rows), batch * triton.cdiv(heads, HEADS))](
        x, cosine, sine, out, heads, positions, size // 2,
        positions * per_row if cosine.shape[0] > 1 else 0, per_row, *x.stride()[:3], sign,
        READS_PAIRS=paired and sign > 0, WRITES_PAIRS=paired and sign < 0,
        HEADS=HEADS, ROWS=rows, BLOCK=block(size // 2), WIDE=wide(x.dtype),
    )  # fmt: skip
    return out


def _turned_by_torch(x: Tensor, cosine: Tensor, sine: Tensor, sign: float, paired: bool) -> Tensor:
    if sign > 0 or not paired:
        return reference(x, cosine, sine, paired)
    return torch.stack(reference(x, cosine, sine).chunk(2, -1), -1).flatten(-2)


def _rows(half: int, nbytes: int) -> int:
    """Positions of a program, whose values take so many bytes each."""
    return max(1, TURNED_BYTES // nbytes // block(half))


@custom_op("meshwright::rotary", mutates_args=())
def rotary(x: Tensor, cosine: Tensor, sine: Tensor, paired: bool = False) -> Tensor:
    """x turned by its positions' angles, which have no gradient; as `reference`."""
    return _turned(x, cosine, sine, 1.0, paired)


@custom_op("meshwright::rotary_backward", mutates_args=())
def rotary_backward(grad: Tensor, cosine: Tensor, sine: Tensor, paired: bool = False) -> Tensor:
    """The gradient is turned back."""
    return _turned(grad, cosine, sine, -1.0, paired)


@rotary.register_fake
@rotary_backward.register_fake
def _shapes(x: Tensor, cosine: Tensor, sine: Tensor, paired: bool = False) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.paired = inputs[3]


def _differentiate(ctx, grad):
    return rotary_backward(grad, *ctx.saved_tensors, ctx.paired), None, None, None


rotary.register_autograd(_differentiate, setup_context=_save)


ANCHORS = ("aten.add.Tensor", "aten.cat.default")


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    found = _by_halves(flow, op) if op.name == "aten.cat.default" else _swapped(flow, op)
    if found is None:
        return None
    angles = [_angle(flow, value, found.whole) for value in (found.cosine, found.sine)]
    bad = next((angle for angle in angles if isinstance(angle, Miss)), None)
    if bad or len(flow.shape(found.x)) != 4:
        return bad or Miss("its heads are not [samples, heads, positions, size]")
    cos, sin = (angle for angle in angles if not isinstance(angle, Miss))
    given: dict[str, Arg] = {"x": found.x, "cosine": cos, "sine": sin, "paired": found.paired}
    return Match(found.ops, kernel_call("rotary", given, op, list(op.outputs)), op)


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Both halves of x turned."""

    x: Arg
    cosine: Arg
    sine: Arg
    ops: tuple[RawOp, ...]
    whole: bool
    """Whether angles are as wide as x, each twice."""
    paired: bool = False


def _swapped(flow: Flow, op: RawOp) -> _Rotation | None:
    """x cosine + (x with its halves swapped, the first negated) sine."""
    first, second = (flow.maker(op.args[key], "aten.mul.Tensor") for key in ("self", "other"))
    if first is None or second is None or op.args["alpha"] != 1:
        return None
    for swapped, sine in either_way(second):
        if turned := _halves_swapped(flow, swapped):
            x, calls = turned
            cosine = next((b for a, b in either_way(first) if a == x), None)
            return _Rotation(x, cosine, sine, (first, *calls, second, op), whole=True)
    return None


def _by_halves(flow: Flow, op: RawOp) -> _Rotation | None:
    """cat(a cosine - b sine, b cosine + a sine) of the parts a, b of x."""
    parts = op.args["tensors"]
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    less, more = flow.maker(parts[0], "aten.sub.Tensor"), flow.maker(parts[1], "aten.add.Tensor")
    if not (less and more) or less.args["alpha"] != 1 or more.args["alpha"] != 1:
        return None
    products = [flow.maker(sum_.args[key], "aten.mul.Tensor")
                for sum_ in (less, more) for key in ("self", "other")]  # fmt: skip
    known = [times for times in products if times]
    if len(known) < 4 or op.args["dim"] not in (-1, len(flow.shape(parts[0])) - 1):
        return None
    for (a, cosine), (b, sine) in product(either_way(known[0]), either_way(known[1])):
        others = ([{b, cosine}, {a, sine}], [{a, sine}, {b, cosine}])
        if [set(_operands(other)) for other in known[2:]] not in others:
            continue
        if cut := _parts(flow, a, b):
            x, cuts, paired = cut
            ops = (*cuts, *known, less, more, op)
            return _Rotation(x, cosine, sine, ops, whole=False, paired=paired)
    return None


def _operands(op: RawOp) -> tuple[Arg, Arg]:
    return op.args["self"], op.args["other"]


def _parts(flow: Flow, a: Arg, b: Arg) -> tuple[Arg, tuple[RawOp, ...], bool] | None:
    """x, the calls that cut it in two, and whether by even and odd places, not into halves."""
    chunk = flow.maker(a, "aten.chunk.default")
    if chunk is not None:
        x = chunk.args["self"]
        last, names = len(flow.shape(x)) - 1, [v.name for v in (a, b) if isinstance(v, Ref)]
        fine = chunk.args["chunks"] == 2 and chunk.args["dim"] in (-1, last)
        equal = flow.shape(a) == flow.shape(b)
        return (x, (chunk,), False) if fine and equal and names == list(chunk.outputs) else None
    first, second = flow.maker(a, "aten.slice.Tensor"), flow.maker(b, "aten.slice.Tensor")
    if not (first and second) or first.args["self"] != second.args["self"]:
        return None
    x = first.args["self"]
    last, size = len(flow.shape(x)) - 1, flow.shape(x)[-1]
    cuts = _cuts(first, second)
    if size % 2 or cuts not in (_halves(last, size), _pairs(last, size)):
        return None
    return x, (first, second), cuts == _pairs(last, size)


def _cuts(*slices: RawOp) -> list[tuple[Arg, ...]]:
    return [tuple(cut.args[key] for key in ("dim", "start", "end", "step")) for cut in slices]


def _halves(last: int, size: int) -> list[tuple[Arg, ...]]:
    return [(last, 0, size // 2, 1), (last, size // 2, size, 1)]


def _pairs(last: int, size: int) -> list[tuple[Arg, ...]]:
    return [(last, 0, size, 2), (last, 1, size, 2)]


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
    whole = size % 2 == 0 and cat.args["dim"] in (-1, last)
    whole = whole and _cuts(first, second) == _halves(last, size)
    return (x, (first, second, negated, cat)) if whole else None


def _angle(flow: Flow, value: Arg, whole: bool) -> Arg | Miss:
    """[samples or 1, positions, size] of what is broadcast over heads."""
    opened = flow.maker(value, "aten.unsqueeze.default")
    if opened is None or opened.args["dim"] != 1 or len(flow.shape(value)) != 4:
        return Miss("its angles are not made for all heads at once")
    if flow.has_gradient(value):
        return Miss("its angles have a gradient")
    if whole and not _halves_are_equal(flow, opened.args["self"]):
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
    """x[b, h, t, e] and angles [b or 1, t, e or half of it], whose gradients nobody wants."""
    x = (("b",), ("h",), ("t",), ("e",))
    wide, narrow = (shape[-1] for shape in input_shapes(op, graph)[:2])
    angles = (("b",), ("t",), ("e",) if narrow == wide else ("f",))
    return make_rule(op, graph, [x, angles, angles], [x], whole={"e", "f"}, linear=[{0}])


OPERATORS = {"rotary": (rotary, reference)}
FACTS = {
    "meshwright.rotary": OpFacts(rule=_rule, autocast="first", fused=True, torch_passes=5.0),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16, and heads of `width`."""
    half, nbytes, heads = width // 2, 4 if element == "fp32" else 2, 32
    values = {"heads": heads, "positions": 2048, "half": half, "per_sample": 2048 * width}
    values |= {"per_row": width, "sample_step": 2048 * heads * width, "head_step": width}
    values |= {"row_step": heads * width}
    tensors = dict.fromkeys(("x", "cosine", "sine", "out"), f"*{element}")
    given = {**tensors, **dict.fromkeys(values, "i32"), "sign": "fp32"}
    rows = _rows(half, nbytes)
    constants = {"HEADS": HEADS, "ROWS": rows, "BLOCK": block(half), "WIDE": tl.float32}
    pairs = rows * half * nbytes
    for reads, writes in ((False, False), (True, False), (False, True)):
        yield Build(
            turn_kernel, given, {"READS_PAIRS": reads, "WRITES_PAIRS": writes, **constants}, values,
            moves=HEADS * 4 * pairs, cached=2 * pairs, filled=half / block(half),
        )  # fmt: skip
