"""What the backwards of torch's operators hold at once beside what their forwards kept and the
gradients that they are given and make: those that torch writes as several kernels, each of which
makes a value (tools/autograd/derivatives.yaml and FunctionsManual.cpp of torch)."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.rules import given


class Temporaries(NamedTuple):
    """How many for each element of the operator's largest tensor."""

    values: int = 0
    """As wide as its result."""
    flags: int = 0
    """Of a byte."""


NONE = Temporaries()


def _table(*lines: tuple[int, int, str]) -> dict[str, Temporaries]:
    return {
        name: Temporaries(values, flags) for values, flags, names in lines for name in names.split()
    }


_OF_ONE = _table(
    (
        1,
        0,
        "abs binary_cross_entropy_with_logits cosh exp2 expm1 gather index index_select l1_loss "
        "linalg_vector_norm log1p log2 norm sin sinh sort sqrt std topk var var_mean",
    ),
    (2, 0, "atan cos cumsum logsumexp pow reciprocal rsqrt square tan"),
    (3, 0, "asinh atanh erfinv"),
    (4, 0, "asin erf erfc"),
    (5, 0, "acos"),
    (5, 11, "cumprod"),
    (6, 0, "prod"),
    (7, 0, "logcumsumexp"),
    (0, 1, "amax amin clamp_max clamp_min"),
    (0, 2, "clamp clip"),
)
_OF_SECOND = _table(
    (1, 0, "binary_cross_entropy"),
    (1, 2, "maximum minimum"),
    (2, 0, "cosine_similarity div divide hypot true_divide"),
    (3, 0, "logaddexp"),
    (5, 0, "atan2"),
    (5, 1, "pow"),
)
"""Of two tensors, where the second has a gradient."""


_SUMMED = frozenset("div divide maximum minimum mul multiply rsub sub subtract true_divide".split())
"""A gradient of an operand that was spread is made whole, then summed."""


def temporaries(target: str, wanted: Sequence[bool], spread: bool) -> Temporaries:
    """Those of an operator's backward; `wanted`: which of its tensors have a gradient; `spread`:
    whether one of these is smaller than the result."""
    space, name, *_ = *target.split("."), ""
    if space != "aten" or not any(wanted):
        return NONE
    of_second = len(wanted) > 1 and wanted[1] and name in _OF_SECOND
    found = _OF_SECOND[name] if of_second else _OF_ONE.get(name, NONE)
    return found._replace(values=found.values + 1) if spread and name in _SUMMED else found


def is_sum(op: Op) -> bool:
    """Tells whether gradients of an operator's operands are that of its result."""
    return op.target == "aten.add.Tensor" and given(op, "alpha", 1) == 1
