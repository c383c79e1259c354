"""Plans whose state outlives the loss of any node, or of any device."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.forms.survival import Part, lost_with
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.finding import few
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash

FIRST = 0.5
"""Of the time, for the search without further pins: if its best plan survives, none is faster."""

Solve = Callable[[tuple[str, ...], float], tuple[Plan, ...]]
"""Pins, beside those that were asked for, and seconds -> the best plan and its finalists."""


def surviving(solve: Solve, cluster: Cluster, part: Part, time_limit_s: float) -> tuple[Plan, ...]:
    """The fastest plan found that survives, and its finalists that do; Infeasible says what the
    best one would lose. The search is of a few kinds of plans, so no bound holds for it."""
    best: tuple[Plan, ...] = ()
    first: Plan | None = None
    failed: Infeasible | None = None
    tried = _pins(cluster)
    for pins in tried:
        share = (1 - FIRST) / (len(tried) - 1) if pins else FIRST
        try:
            plans = solve(pins, share * time_limit_s)
        except Infeasible as error:
            failed = failed or error
            continue
        first = first or plans[0]
        sound = tuple(_said(p, part) for p in plans if not lost_with(p, cluster, part))
        if sound and (not best or _step_s(sound[0]) < _step_s(best[0])):
            best = sound
        if not pins and not lost_with(plans[0], cluster, part):
            break
    if best:
        return best
    if first is None:
        assert failed is not None
        raise failed
    stage, lost = next(iter(lost_with(first, cluster, part).items()))
    what = part.removeprefix("any ")
    raise Infeasible(
        f"survives={part!r}: no plan was found whose state lies on two {what}s everywhere; in the "
        f"fastest, stage {stage} has some that {what} {few(lost)[1:-1]} alone holds. Nearest: "
        "without it, and a checkpoint more often"
    )


def _pins(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Under which replicas hold the same: whole, one a node or two in all, one a device."""
    nodes, devices = max(cluster.num_nodes, 2), cluster.num_devices
    counts = dict.fromkeys((nodes, devices))
    replicas = tuple(("pp=1", f"dp_replicate={count}") for count in counts)
    return ((), ("zero=0",), *replicas)


def _step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def _said(plan: Plan, part: Part) -> Plan:
    note = f"survives {part}: whatever is lost with it, other ranks hold, too"
    return rehash(replace(plan, notes=(note, *plan.notes)))
