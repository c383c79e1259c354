"""The operators that generated code may call, and their arguments."""

from typing import NamedTuple

import torch

from meshwright.ir import experts
from meshwright.ir.errors import PlanError
from meshwright.ir.ops import LIBRARY
from meshwright.ir.torch_private import OpOverload, schema_arguments

assert experts.ACTIVATIONS  # importing it makes its operators known

NAMESPACES = frozenset({"aten", "prims", LIBRARY.ns})
"""Where an op target may come from; a graph is data and must not name arbitrary code."""


class Argument(NamedTuple):
    """One argument in an operator's schema."""

    name: str
    keyword_only: bool
    required: bool
    default: object


def operator(target: str) -> OpOverload:
    """The operator called `aten.linear.default`."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    if namespace in NAMESPACES and name.isidentifier() and (overload or "default").isidentifier():
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, overload or "default", None)
        if isinstance(found, OpOverload):
            return found
    raise PlanError(f"{target!r} is not an operator of {', '.join(sorted(NAMESPACES))}")


def arguments(op: OpOverload) -> tuple[Argument, ...]:
    """The operator's arguments in order."""
    return tuple(
        Argument(a.name, a.kwarg_only, not a.has_default_value(), a.default_value)
        for a in schema_arguments(op)
    )
