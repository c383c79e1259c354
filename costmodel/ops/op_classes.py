"""Which kind of work an op is."""

from functools import cache

from meshwright.ir.cluster.device import COMPUTE as COMPUTE
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Op
from meshwright.ir.ops import facts


@cache
def op_name(target: str) -> str:
    """`linear` of `aten.linear.default`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def classify(target: str) -> OpClass:
    """The class of an op; what no family knows is elementwise."""
    return facts(target).op_class


def class_of(op: Op) -> OpClass:
    """The class of a call, whose arguments may decide it."""
    found = facts(op.target)
    return found.class_of_call(op) if found.class_of_call else found.op_class


def is_view(target: str) -> bool:
    """Whether an op only looks at its input differently."""
    return facts(target).op_class is OpClass.VIEW


def looks_up(target: str) -> bool:
    """Whether an op reads, of its first input, only what it is asked for."""
    return facts(target).op_class is OpClass.GATHER
