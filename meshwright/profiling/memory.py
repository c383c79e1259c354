"""The ways of training a model by which its heap is measured: on one process, whole."""

from collections.abc import Sequence

from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import microbatch_counts

_WAYS = ((1, "none"), (4, "none"), (2, "full"))
"""(micro-batches, recompute): much, little and next to nothing is kept. On a CPU the last serves
only where nothing else fits: with all made again in one process the heap has more holes than ranks
that do so were seen to have."""
_ROOM = 2.0
"""What a process may hold beside live tensors, relative to them; assumption."""


def heap_plans(problem: Problem, free_bytes: int) -> list[Plan]:
    """Plans for one process that fit into memory, each of another kind."""
    counts = microbatch_counts(problem)
    found: dict[tuple[int, str], Plan] = {}
    on_cpu = problem.cluster.device_types[0].kind == "cpu"
    for wanted, recompute in _WAYS:
        if found and on_cpu and recompute != "none":
            continue
        count = min(counts, key=lambda n: (abs(n - wanted), n))
        if (count, recompute) in found:
            continue
        plan = build_plan(
            problem, uniform_choice(problem, num_microbatches=count, recompute=recompute)
        )
        if _needed_bytes(plan) < free_bytes:
            found[count, recompute] = plan
    return list(found.values())


def rounds(plans: Sequence[Plan], free_bytes: int) -> list[list[Plan]]:
    """Which of them run beside one another: all where there is room, as no time is measured."""
    needed = sum(_needed_bytes(plan) for plan in plans)
    return [list(plans)] if plans and needed < free_bytes else [[plan] for plan in plans]


def _needed_bytes(plan: Plan) -> float:
    assert plan.predicted
    return _ROOM * plan.predicted.stages[0].memory.tensor_bytes
