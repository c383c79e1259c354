"""Rotary position embedding: x cos + (its halves swapped, one negated) sin."""

from meshwright.ir.fusions.flow import Flow, Match, Miss, either_way, kernel_call
from meshwright.ir.graph import Arg, Ref
from meshwright.ir.raw import RawOp

ANCHORS = ("aten.add.Tensor",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    products = [flow.maker(op.args[key], "aten.mul.Tensor") for key in ("self", "other")]
    first, second = products
    if first is None or second is None or op.args["alpha"] != 1:
        return None
    for swapped, sine in either_way(second):
        turned = _turned(flow, swapped)
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


def _turned(flow: Flow, value: Arg) -> tuple[Arg, tuple[RawOp, ...]] | None:
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
