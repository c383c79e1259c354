"""Element by element with broadcasting: every dim may be split; sums pass through linear ones."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Op, Ref
from meshwright.ir.graph.op_facts import NO_FLOPS, MakeRule, OpFacts, named, per_element
from meshwright.ir.graph.rules import (
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
    slot,
)

Linear = Callable[[Op, Graph], list[set[int]]]
"""Sets of inputs in which an op is jointly linear."""


def elementwise(linear: Linear = lambda op, graph: []) -> MakeRule:
    """The rule of an op each element of whose result is made of those in its place."""

    def rule(op: Op, graph: Graph) -> Rule | None:
        if not op.inputs or len(op.outputs) != 1:
            return None
        out = letters("d", len(output_shapes(op, graph)[0]))
        shapes = input_shapes(op, graph)
        if any(len(shape) > len(out) for shape in shapes):
            return None
        inputs = [aligned(out, len(shape)) for shape in shapes]
        return make_rule(op, graph, inputs, [out], linear=linear(op, graph))

    return rule


def _first(op: Op, graph: Graph) -> list[set[int]]:
    """Rounding summands is not rounding their sum. `type_as` reads only the dtype of its second."""
    source, made = (DTYPE_BYTES[graph.tensors[x].dtype] for x in (op.inputs[0], op.outputs[0]))
    return [] if made < source else [{0}]


def _product(op: Op, graph: Graph) -> list[set[int]]:
    return [{i} for i in range(len(op.inputs))]


def _quotient(op: Op, graph: Graph) -> list[set[int]]:
    return [{0}] if slot(op, "self") == 0 and not given(op, "rounding_mode") else []


def _sum(op: Op, graph: Graph) -> list[set[int]]:
    both = all(isinstance(given(op, key), Ref) for key in ("self", "other"))
    return [{0, 1}] if both else []


def _where(op: Op, graph: Graph) -> list[set[int]]:
    values = {i for key in ("self", "other") if (i := slot(op, key)) is not None}
    zero = [given(op, key) for key in ("self", "other") if slot(op, key) is None]
    return [values] if values and all(v == 0 for v in zero) else []


def _masked_fill(op: Op, graph: Graph) -> list[set[int]]:
    return [{0}] if given(op, "value") == 0 else []


def _in_place(names: str) -> dict[str, OpFacts]:
    """Both ways to call an op that has no curve of its own."""
    return named(f"{names} {names.replace(' ', '_ ')}_", _PLAIN)


def _class_of_power(op: Op) -> OpClass:
    """Tells powers that torch's kernels multiply, divide or take a root for from all others
    (pow_tensor_optimized_kernel of CPUs and pow_tensor_scalar_kernel_impl of CUDA)."""
    return OpClass.ELEMENTWISE if given(op, "exponent") in _SHORT else OpClass.TRANSCENDENTAL


_SHORT = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""Exponents."""
_PLAIN = OpFacts(rule=elementwise())
_LINEAR = OpFacts(rule=elementwise(_first))
_COPY = replace(_LINEAR, op_class=OpClass.COPY, flops=NO_FLOPS)
_SUM = OpFacts(rule=elementwise(_sum))
_VIEW = replace(_LINEAR, op_class=OpClass.VIEW, flops=NO_FLOPS)
_CURVED = replace(_PLAIN, op_class=OpClass.TRANSCENDENTAL)
FACTS = {
    **_in_place(
        "abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not "
        "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max "
        "clamp_min clip copysign cosh eq erfc erfinv exp2 expm1 fill floor floor_divide fmod frac "
        "ge gt hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf le "
        "leaky_relu lerp log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or "
        "logical_xor logit lt maximum minimum nan_to_num ne reciprocal relu relu6 remainder round "
        "selu sgn sign sinh softshrink sqrt square tan threshold trunc xlogy not_equal greater "
        "less greater_equal less_equal"
    ),
    **named("cos_ elu_ erf_ exp_ log_ mish_ pow_ rsqrt rsqrt_ sin_", _PLAIN),
    **named("tanh_", replace(_PLAIN, flops=per_element(5))),
    **named("sigmoid_", replace(_PLAIN, flops=per_element(4))),
    **named("cos elu erf exp log mish sin softplus", _CURVED),
    **named("pow", replace(_CURVED, class_of_call=_class_of_power)),
    **named("gelu gelu_", replace(_CURVED, flops=per_element(10))),
    **named("silu silu_ tanh", replace(_CURVED, flops=per_element(5))),
    **named("sigmoid", replace(_CURVED, flops=per_element(4))),
    **named("empty_like full_like ones_like zeros_like", replace(_PLAIN, flops=NO_FLOPS)),
    **named("add add_", replace(_SUM, backward="handed on if alike")),
    **named("sub sub_ subtract subtract_ rsub", _SUM),
    **named("mul mul_ multiply multiply_", OpFacts(rule=elementwise(_product))),
    **named(
        "div div_ divide divide_ true_divide true_divide_", OpFacts(rule=elementwise(_quotient))
    ),
    **named("where", OpFacts(rule=elementwise(_where))),
    **named("masked_fill masked_fill_", OpFacts(rule=elementwise(_masked_fill))),
    **named(
        "neg neg_ positive real imag conj _conj resolve_conj lift_fresh type_as "
        "view_as_complex_copy",
        _LINEAR,
    ),
    **named("clone", replace(_COPY, backward="handed on")),
    **named("contiguous", replace(_COPY, shares="if it can", backward="handed on")),
    **named("to", replace(_COPY, autocast="traced", shares="if it casts nothing")),
    **named("_to_copy", replace(_COPY, flops=None, autocast="traced")),
    **named("copy copy_", replace(_COPY, rule=elementwise())),
    **named("alias detach detach_", _VIEW),
    **named("lift_fresh_copy", replace(_VIEW, flops=None, backward="handed on")),
}
