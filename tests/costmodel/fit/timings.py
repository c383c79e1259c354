"""Measured blocks and timings."""

from meshwright.ir.profile.profile import (
    BlockRecord,
    Timing,
)


def timing(seconds: float) -> Timing:
    return Timing(median_s=seconds, spread=0.05, count=10)


def block(key: str, forward_s: float) -> BlockRecord:
    return BlockRecord(
        key=key, pattern=key, samples=3, tp=1, processes=2, forward=timing(forward_s),
        backward=timing(2 * forward_s), backward_input=None, backward_weight=None,
        no_grad_forward=timing(forward_s / 2),
    )  # fmt: skip
