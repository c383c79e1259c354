"""Op strategies: one file per op family, each with `rule(op, graph) -> Rule | None`.

A new file is found by itself. An op that no file knows is computed whole.
"""

import importlib
import pkgutil

from meshwright.ir.graph import Graph, Op
from meshwright.planner.inside.rules import Rule

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_rule(op: Op, graph: Graph) -> Rule | None:
    """The rule of the first family that knows the op."""
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        found: Rule | None = module.rule(op, graph)
        if found is not None:
            return found
    return None
