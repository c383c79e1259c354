"""Operators by name, as a graph names them, and their arguments."""

from typing import NamedTuple

import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.graph import experts, float8, frequency, noise, quantised, recurrence
from meshwright.ir.torch_private import OpOverload, schema_arguments

assert experts.EXPERTS and float8.LINEARS and frequency.COUNT_ROWS and noise.NOISE
assert quantised.NF4 and recurrence.RECURRENCE
# Importing them makes their operators known.


class Argument(NamedTuple):
    """One argument in an operator's schema."""

    name: str
    keyword_only: bool
    required: bool
    default: object


def operator(target: str) -> OpOverload:
    """The operator called `aten.linear.default`.

    Those of a user's own library are found once the code that registers them has been imported; a
    name can stand for nothing else, so a graph stays data.
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    parts = (namespace, name, overload or "default")
    if all(part.isidentifier() and not part.startswith("__") for part in parts):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, overload or "default", None)
        if isinstance(found, OpOverload):
            return found
    raise PlanError(
        f"{target!r} is not an operator that torch knows in this process: import the module that "
        "registers it first"
    )


def arguments(op: OpOverload) -> tuple[Argument, ...]:
    """The operator's arguments in order."""
    return tuple(
        Argument(a.name, a.kwarg_only, not a.has_default_value(), a.default_value)
        for a in schema_arguments(op)
    )
