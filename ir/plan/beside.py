"""Whether plans wait for their collectives, and of which plans a bound is."""

from meshwright.ir.kernels import is_placed
from meshwright.ir.placed import used
from meshwright.ir.plan.plan import Plan


def waits_for_collectives(plan: Plan) -> bool:
    """Tell whether blocks wait for their collectives and run as they are: nothing overlaps, no
    kernel takes over a collective, no block is compiled, and `Stage.sync` moves no gather."""
    beside = any(s.overlap != "none" or s.compile or s.sync is not None for s in plan.stages)
    return not beside and not any(map(is_placed, used(plan)))


def bounded(plan: Plan) -> str:
    """Name the plans that the bound in a plan's evidence is of."""
    return "no plan that waits for its collectives" if waits_for_collectives(plan) else "no plan"
