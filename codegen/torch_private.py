"""What codegen needs of torch that is private, or not in every version: operator schemas, renamed
collectives. Checked on the versions in `ir.torch_private.CHECKED_ON`."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir import experts
from meshwright.ir.errors import PlanError
from meshwright.ir.ops import LIBRARY

assert experts.ACTIVATIONS  # importing it makes its operators known

NAMESPACES = frozenset({"aten", "prims", LIBRARY.ns})
"""Where an op target may come from; a graph is data and must not name arbitrary code."""

# torch 2.13 renamed these two and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Argument(NamedTuple):
    """One argument in an operator's schema."""

    name: str
    keyword_only: bool
    required: bool
    default: object


def operator(target: str) -> torch._ops.OpOverload:
    """The operator called `aten.linear.default`."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    if namespace in NAMESPACES and name.isidentifier() and (overload or "default").isidentifier():
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, overload or "default", None)
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise PlanError(f"{target!r} is not an operator of {', '.join(sorted(NAMESPACES))}")


def arguments(op: torch._ops.OpOverload) -> tuple[Argument, ...]:
    """The operator's arguments in order."""
    return tuple(
        Argument(a.name, a.kwarg_only, not a.has_default_value(), a.default_value)
        for a in op._schema.arguments
    )


def all_gather(result: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Flat: `result` is every rank's `part`, one after the other."""
    _all_gather(result, part, group=group)


def reduce_scatter(
    result: Tensor, whole: Tensor, group: dist.ProcessGroup | None, *, wait: bool = True
) -> dist.Work | None:
    """Flat: sums `whole` over the ranks; `result` is this rank's part, once the work is done."""
    work: dist.Work | None = _reduce_scatter(result, whole, group=group, async_op=not wait)
    return work
