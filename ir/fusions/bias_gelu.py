"""GELU of a product with a bias: the bias is added, its gradient summed, and what comes after it
dropped, in GELU's pass."""

from meshwright.ir.fusions.flow import Flow, Match, Miss, kernel_call
from meshwright.ir.fusions.gelu import tanh_gelu
from meshwright.ir.graph import Arg, Ref
from meshwright.ir.operators import operator
from meshwright.ir.raw import RawOp, make_op

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
        given |= {"p": dropout.args["p"], **_ONE_SAMPLE}
        fused = kernel_call("bias_gelu_dropout", given, dropout, list(dropout.outputs))
        return Match((*calls, dropout), fused, dropout, before)
    return Match(calls, kernel_call("bias_gelu", given, op, list(op.outputs)), op, before)


_ONE_SAMPLE: dict[str, Arg] = {"seeds": (0,), "dim": -1, "outer": 1, "per_sample": 1}
"""What lowering replaces by the seeds of samples."""


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
