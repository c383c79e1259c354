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
    else:
        share = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * v * v)
    return share, slope
