"""Whether plans wait for their collectives, and of which plans a bound is."""

from meshwright.ir.kernels import is_placed
from meshwright.ir.placed import used
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import Plan


def waits_for_collectives(plan: Plan) -> bool:
    """Tell whether blocks wait for their collectives and run as they are, and replicas agree within
    the step."""
    return blocks_wait(plan) and not chooses_sync(plan)


def blocks_wait(plan: Plan) -> bool:
    """Tell whether blocks wait for their collectives and run as they are: nothing overlaps, no two
    actions run together, no kernel takes over a collective, no block is compiled or recorded."""
    beside = bool(paired_stages(plan)) or any(
        s.overlap != "none" or s.compile or s.capture for s in plan.stages
    )
    return not beside and not any(map(is_placed, used(plan)))


def chooses_sync(plan: Plan) -> bool:
    """Tell whether replicas agree by a form that is none of ZeRO's, or parameters differ in it."""
    return any(s.sync is not None or s.store is not None or s.by_parameter for s in plan.stages)


def bounded(plan: Plan) -> str:
    """Name the plans that the bound in a plan's evidence is of."""
    if waits_for_collectives(plan):
        return "no plan that waits for its collectives"
    return "no plan whose blocks wait for their collectives" if blocks_wait(plan) else "no plan"
