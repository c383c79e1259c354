"""What the best plan is: the fastest, the smallest, the cheapest, or that of the largest batch."""

import difflib
from collections.abc import Iterable

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.decisions import Constraint, Pin, StepCap

OBJECTIVES = ("throughput", "memory", "cheapest", "batch")
"""`cheapest`: least money per sample; `batch`: the largest batch that fits, then the fastest."""
HOUR_S = 3600.0


def check_objective(objective: str, cluster: Cluster) -> None:
    """PlanError if there is no such objective, or the cluster lacks what it needs."""
    if objective not in OBJECTIVES:
        near = difflib.get_close_matches(objective, OBJECTIVES, 1, 0.0)[0]
        known = ", ".join(OBJECTIVES)
        raise PlanError(f"objective {objective!r} is none of {known}; nearest is {near!r}")
    if objective == "cheapest" and cluster.prices_per_hour is None:
        names = [d.name for d in cluster.device_types if d.price_per_hour is None]
        raise PlanError(
            f"objective 'cheapest': cluster {cluster.name} has no price for {', '.join(names)}; "
            "set price_per_hour of the device type"
        )


def rating(objective: str, cluster: Cluster, plan: Plan) -> tuple[float, float]:
    """What is made as small as can be among plans of one batch, and what decides between equals."""
    assert plan.predicted
    step_s, peak = plan.predicted.step_s, float(plan.predicted.peak_bytes)
    match objective:
        case "memory":
            return peak, step_s
        case "cheapest":
            return cost_per_step(cluster, plan) / plan.global_batch_size, step_s
    return step_s, peak


def cost_per_step(cluster: Cluster, plan: Plan) -> float:
    """Money for one step; nodes are paid for as a whole, those without work not at all."""
    assert plan.predicted
    return price_per_hour(cluster, plan) * plan.predicted.step_s / HOUR_S


def price_per_hour(cluster: Cluster, plan: Plan) -> float:
    """Of all nodes that a plan uses."""
    prices = cluster.prices_per_hour
    assert prices is not None  # check_objective
    used = {cluster.node_of(rank) for stage in plan.stages for rank in stage.devices}
    return sum(prices[node] for node in sorted(used))


def bounds_batch(constraints: Iterable[Constraint]) -> bool:
    """Whether some constraint ends the growth of a batch: else more micro-batches always help."""
    return any(
        isinstance(item, StepCap)
        or (isinstance(item, Pin) and item.name == "num_microbatches" and item.relation != ">=")
        for item in constraints
    )
