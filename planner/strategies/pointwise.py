"""Element by element with broadcasting: every dim may be split; sums pass through linear ones."""

from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Op, Ref
from meshwright.ir.graph.rules import (
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
    slot,
)

LINEAR = frozenset(
    "neg clone contiguous alias detach positive lift_fresh lift_fresh_copy to _to_copy type_as "
    "view_as_complex_copy real imag conj _conj resolve_conj".split()
)
"""Linear in their first input. `type_as` reads only the dtype of its second."""

PRODUCTS = frozenset(["mul", "multiply"])
QUOTIENTS = frozenset(["div", "divide", "true_divide"])
SUMS = frozenset(["add", "sub", "subtract", "rsub"])

OTHERS = frozenset(
    "abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not "
    "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max "
    "clamp_min clip copy copysign cos cosh dropout elu eq erf erfc erfinv exp exp2 expm1 "
    "fill floor floor_divide fmod frac ge gelu gt hardshrink hardsigmoid "
    "hardswish hardtanh isfinite isinf isnan isneginf isposinf le leaky_relu lerp log log10 log1p "
    "log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt "
    "masked_fill maximum minimum mish nan_to_num ne pow prelu reciprocal relu relu6 remainder "
    "round rsqrt selu sgn sigmoid sign silu sin sinh softplus softshrink softsign sqrt square tan "
    "tanh threshold trunc where xlogy not_equal greater less greater_equal less_equal "
    "ones_like zeros_like full_like empty_like".split()
)


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op).removesuffix("_") or name_of(op)
    if op.target in ("aten.min.other", "aten.max.other"):
        name = "minimum"
    if name not in LINEAR | PRODUCTS | QUOTIENTS | SUMS | OTHERS or not op.inputs:
        return None
    if name == "prelu" or len(op.outputs) != 1:
        return None
    out = letters("d", len(output_shapes(op, graph)[0]))
    shapes = input_shapes(op, graph)
    if any(len(shape) > len(out) for shape in shapes):
        return None
    inputs = [aligned(out, len(shape)) for shape in shapes]
    return make_rule(op, graph, inputs, [out], linear=_linear(name, op, graph))


def _linear(name: str, op: Op, graph: Graph) -> list[set[int]]:
    if name in LINEAR:
        return [] if _narrows(op, graph) else [{0}]
    if name in PRODUCTS:
        return [{i} for i in range(len(op.inputs))]
    if name in QUOTIENTS:
        return [{0}] if slot(op, "self") == 0 and not given(op, "rounding_mode") else []
    if name in SUMS:
        both = all(isinstance(given(op, key), Ref) for key in ("self", "other"))
        return [{0, 1}] if both else []
    if name == "where":
        values = {i for key in ("self", "other") if (i := slot(op, key)) is not None}
        zero = [given(op, key) for key in ("self", "other") if slot(op, key) is None]
        return [values] if values and all(v == 0 for v in zero) else []
    if name == "masked_fill":
        return [{0}] if given(op, "value") == 0 else []
    return []


def _narrows(op: Op, graph: Graph) -> bool:
    """Rounding summands is not rounding their sum."""
    return (
        DTYPE_BYTES[graph.tensors[op.outputs[0]].dtype]
        < DTYPE_BYTES[graph.tensors[op.inputs[0]].dtype]
    )
