"""What becomes of the values that the ops of a block make and its backward needs.

Each such value has one maker: an op, or what is put before an op to bring an operand together
(`attn.c_attn/addmm<`: a gathered copy that only this op reads). A view belongs to the maker of the
memory that it looks into. What enters or leaves the block is always kept.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from meshwright.ir.graph.graph import Block, Graph

Keeping = str
"""A key of `forms.retention`: `keep`, `recompute` (the op runs again before the backward of its
block), `offload` (moved to the host's memory and back), or another's."""


def operands_key(op_key: str) -> str:
    """The key of what is put before an op to bring its operands together."""
    return f"{op_key}<"


def makers(graph: Graph, block: Block) -> tuple[str, ...]:
    """All keys of a block that a policy can name."""
    keys = [op.key for op in graph.block_ops(block)]
    return (*keys, *map(operands_key, keys))


def keeping_of(policy: Mapping[str, Keeping], key: str) -> Keeping:
    """What a policy (key or pattern -> what) says of one maker; its key outranks patterns."""
    if key in policy:
        return policy[key]
    found = {how for pattern, how in policy.items() if fnmatchcase(key, pattern)}
    return found.pop() if len(found) == 1 else "keep"


def torn(policy: Mapping[str, Keeping], keys: Iterable[str]) -> str:
    """The first key of which patterns say different things; empty if there is none."""
    for key in keys:
        found = {how for pattern, how in policy.items() if fnmatchcase(key, pattern)}
        if key not in policy and len(found) > 1:
            return key
    return ""


def unknown(policy: Mapping[str, Keeping], keys: Iterable[str]) -> tuple[str, ...]:
    """Keys and patterns of a policy that name none of the makers."""
    known = tuple(keys)
    return tuple(p for p in policy if p not in known and not any(fnmatchcase(k, p) for k in known))
