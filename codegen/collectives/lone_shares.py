"""What conversions over dp are along, and multiply by, where replicas train alone."""

from torch import Tensor

from meshwright.ir.layout.conversions import Primitive

Share = tuple[int, int]
"""Numerator and denominator."""
ALL: Share = (1, 1)


def times(x: Tensor, share: Share) -> Tensor:
    """x, multiplied by a share; of whole numbers that may be one with a fraction, in float64."""
    over, under = share
    if over == under:
        return x
    if x.is_floating_point():
        return x * (over / under)
    return x * (over // under) if over % under == 0 else x.double() * over / under


_SUMS = frozenset({Primitive.IDENTITY, Primitive.ALL_REDUCE})
_HERE = frozenset({Primitive.IDENTITY, Primitive.SLICE})
_JOINS = frozenset({Primitive.ALL_REDUCE, Primitive.ALL_GATHER})


def along_dp(
    forward: Primitive, backward: Primitive, own: int, whole: int, *, sums: bool
) -> tuple[str, Share, Share]:
    """Returns the axis that a conversion over dp is along, and by what its value and its gradient
    are multiplied, in a replica that has `own` of `whole` samples; `sums`: no block needs others.

    A sum is what it would be if all samples were like the replica's own, and what is to be counted
    once is counted in each replica, as its share; so the gradient of what a replica has whole (R)
    is its share of that, while those of samples and of summands are as always.
    """
    part, rest = (own, whole), (whole, own)
    if forward is Primitive.MASK:
        return "dp_shard", part, part
    if backward is Primitive.MASK:
        return "dp_shard", ALL, ALL
    if sums and forward in _SUMS and backward in _SUMS:
        by = rest if forward is Primitive.ALL_REDUCE else ALL
        return "dp_shard", by, by
    if forward in _JOINS and backward in _HERE:
        return "dp", ALL, rest
    if forward in _HERE and backward in _JOINS:
        return "dp", ALL, part
    return "dp", ALL, ALL
