"""Cuts a run of ops without repeats into shards of about equal parameters.

As Merak's graph sharding with farthest minimal dependencies (Lai et al. 2023): a shard ends when it
has its part of the parameters, and shards are joined again where an op reads what was made before
the previous shard, so that neighbours alone depend on each other.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from meshwright.ir.graph.graph import Kind, Op, Tensor

SHARDS = 8
"""At most about so many."""


def shard_ends(
    ops: Sequence[Op], start: int, stop: int, tensors: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """Where shards of `ops[start:stop]` begin, `stop` at the end; just both where it is one."""
    seen: set[str] = set()
    weight = [_new_parameters(op, tensors, seen) for op in ops[start:stop]]
    target = sum(weight) / SHARDS
    begins, held = [start], 0.0
    made: dict[str, int] = {}
    for index in range(start, stop):
        own = weight[index - start]
        if held and own and held + own > target:
            begins.append(index)
            held = 0.0
        held += own
        reads = [made[name] for name in ops[index].inputs if name in made]
        while len(begins) > 2 and reads and min(reads) < begins[-2]:
            begins.pop()
            held = sum(weight[begins[-1] - start : index - start + 1])
        made.update(dict.fromkeys(filter(None, ops[index].outputs), index))
    ends = (*begins, stop)
    return ends if all(a < b for a, b in pairwise(ends)) else (start, stop)


def _new_parameters(op: Op, tensors: Mapping[str, Tensor], seen: set[str]) -> float:
    """Elements of parameters that no op before has read."""
    found = {n for n in op.inputs if n in tensors and tensors[n].kind is Kind.PARAMETER} - seen
    seen |= found
    return float(sum(prod(tensors[name].shape) for name in found))
