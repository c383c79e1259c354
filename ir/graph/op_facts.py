"""What is said of an operator, once: how it splits, what work it is, what it makes, how it is
called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Arg, Graph, Op
from meshwright.ir.graph.rules import Rule

Shape = tuple[int, ...]
ShapeOf = Callable[[Arg], Shape]
"""The shape of an argument; () of what is no tensor."""
CountFlops = Callable[[Mapping[str, Arg], ShapeOf, Shape], int]
"""From arguments by name, their shapes and the shape of the first result."""
Autocast = Literal["by class", "first", "float32", "bfloat16", "promoted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """What search, cost model and emitted code know of one operator."""

    op_class: OpClass = OpClass.ELEMENTWISE
    """Which curve of a device says how long it takes."""
    rule: Callable[[Op, Graph], Rule | None] | None = None
    """How its dims may be split; without one that is found by trying it."""
    flops: CountFlops | None = None
    """Of one forward; without it, one for each element of the largest operand."""
    autocast: Autocast = "by class"
    """The dtype of its results under bf16: as its class has it, that of its first input, a fixed
    one, or what promotion says."""
    fused: bool = False
    """It takes values as they are, since autocast does not know it, and makes all gradients in one
    pass."""
    torch_passes: float = 1.0
    """What a CPU moves for it over what its kernel would: counted in its way by torch, which runs
    one operator after the other."""
    form: Callable[[Any, Any], Any] | None = None
    """From a `codegen.lower.site.Site` and its `Form` to the form that a rank calls on its part."""


def per_element(count: int) -> CountFlops:
    """Count so many for each element of the first result."""
    return lambda args, of, out: count * prod(out)


def joined_facts(files: Mapping[str, Mapping[str, OpFacts]]) -> Mapping[str, OpFacts]:
    """Put the facts of several files into one table; PlanError where two speak of one operator."""
    found: dict[str, OpFacts] = {}
    said: dict[str, str] = {}
    for file, facts in files.items():
        for name, one in facts.items():
            if name in found:
                raise PlanError(
                    f"{file}: it says what {name} is, and so does {said[name]}; keep one of them"
                )
            if name.count(".") != 1:
                raise PlanError(
                    f"{file}: {name!r} is no operator; write its namespace and its name without "
                    "overload, such as 'aten.add'"
                )
            found[name], said[name] = one, file
    return found
