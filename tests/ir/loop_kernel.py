"""A kernel with a loop, for the test of Triton's interpreter."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch

from meshwright.ir.launch import jit, tl


@jit
def sum_kernel(into, count):
    """Numbers below `count`."""
    total = 0
    for number in range(0, count):
        total += number
    tl.store(into, total)


def summed(count: int) -> int:
    """Their sum."""
    made = torch.zeros(1, dtype=torch.int32)
    sum_kernel[(1,)](made, count)
    return int(made)
