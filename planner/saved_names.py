"""What a plan does with the values that its layers' backward needs, in one word."""

from meshwright.ir.plan import Plan


def saved_name(plan: Plan) -> str:
    """`offload` if any are moved, else `selective` if any are made again, else `none`."""
    said = {how for s in plan.stages for policy in s.saved.values() for how in policy.values()}
    return "offload" if "offload" in said else "selective" if "recompute" in said else "none"
