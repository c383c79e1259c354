"""Where scores of attention with dropout are whole (on CPUs, and where no kernel takes the
operands), and the memory that they then need."""

from collections.abc import Sequence
from math import prod

LEAST_WIDTH, MOST_WIDTH = 16, 256
"""Of heads that GPUs have a kernel for, in half precision."""
KEPT = 1 << 22
"""Chances that are kept for the backward, at most."""
SCORES = 1 << 24
"""Scores that are held at a time."""
FEW = 1 << 16
"""So many, at most, may torch's own operators keep, whose backward takes less of the host."""


def by_operators(query: Sequence[int], key: Sequence[int], *, masked: bool, kind: str) -> bool:
    """Whether torch's operators have it: on a CPU, where chances are few and every query sees a
    key."""
    few = kind == "cpu" and prod(query[:-1]) * key[-2] <= FEW
    return few and len(query) == len(key) == 4 and not masked


def room_bytes(shapes: Sequence[Sequence[int]], width: int, kind: str) -> tuple[int, int]:
    """Return what is kept for the backward, and the most that is there beside that and beside
    operands, results and their gradients. `shapes`: of queries [..., h, l, e], keys, values and
    maybe a mask; `width`: bytes of a value of these. Chances are computed in float32 at
    least."""
    query, key, value, *mask = shapes
    count, each = prod(query[:-1]) * key[-2], max(width, 4)
    operands = sum(map(prod, shapes[:3]))
    if by_operators(query, key, masked=bool(mask), kind=kind):
        return 3 * count * each + operands * (each - width), count * each
    beside = operands  # gradients, and what is multiplied
    if width < each:
        beside += operands + prod(query[:-1]) * value[-1]
    if count <= KEPT:
        return 2 * count * each, (count + beside) * each
    one = count // query[0] if len(query) > 3 else count
    return 0, (3 * min(count, max(SCORES, one)) + beside) * each
