"""What GELU lets through, for kernels that make it of a sum with a bias."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from meshwright.ir.launch import jit, tl


def kind(tanh: bool) -> str:
    return "tanh" if tanh else "none"


@jit
def share_of(v, TANH: tl.constexpr):
    """The part of v that GELU lets through, and how it grows with v."""
    if TANH:
        inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
        # tanh by way of the logistic function, whose exponent cannot overflow to a nan.
        share = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        slope = 2.0 * share * (1.0 - share) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * v * v)
    elif v.dtype == tl.float64:
        share = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * v * v)
    else:
        share, slope = _by_logistic(v)
    return share, slope


@jit
def _by_logistic(v):
    """The same in float32 with half the instructions of `erf`, which is bound by arithmetic beside
    a dropout: 1 / (1 + 2^(v p(v^2))), where p is of degree six and has the least maximum error of
    the result (by Lawson's method): 2.9e-8, in float32 1.3e-7 with rounding (by erf 6e-8)."""
    square = v * v
    power = 3.816313381e-07 + square * -5.067237909e-09
    power = -1.143983434e-05 + square * power
    power = 0.0001595799436 + square * power
    power = 9.404921758e-05 + square * power
    power = -0.1048351218 + square * power
    power = -2.302209292 + square * power
    return 1.0 / (1.0 + tl.exp2(v * power)), 0.3989422804014327 * tl.exp(-0.5 * square)
