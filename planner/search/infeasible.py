"""When nothing fits: which constraints are in conflict, and the nearest thing that would work."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.plan import Plan
from meshwright.ir.text.units import size
from meshwright.planner.across.model_space import divisors
from meshwright.planner.pins.constraints import Constraint, MemoryCap, OnStage, Pin, StepCap
from meshwright.planner.pins.decisions import EVERYWHERE, STAGE_SIZES
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.plan_comparison import name_of


class RunOutcome(Protocol):
    """What this needs to know of a run."""

    best: Plan | None
    least_excess: tuple[int, Plan] | None


Solve = Callable[[Problem], RunOutcome]
REPLICAS = ("dp", "dp_replicate", "dp_shard")
"""Sizes of a stage that share out the samples of a step."""
_ALL = MemoryCap(nbytes=2**60)
"""A pin that lets a plan use all the memory that a device has."""


def known_conflict(problem: Problem) -> Infeasible | None:
    """Return the error where no search is needed to say that no plan keeps the pins: one is refused
    by the model, or two give one decision different numbers."""
    pins = [item for item in problem.constraints if isinstance(item, Pin) and item.relation == "="]
    for pin in pins:
        decision = DECISIONS[pin.name]
        if decision.refused and pin.scope == EVERYWHERE and (why := decision.refused(problem, pin)):
            # The first of a decision's words is that of plans without it.
            instead = f"; nearest: {pin.name}={decision.words[0]}" if decision.words else ""
            return Infeasible(f"no plan meets '{pin}': {why}{instead}")
    for one, other in combinations(pins, 2):
        alike = (one.name, one.scope) == (other.name, other.scope)
        numbers = isinstance(one.value, int) and isinstance(other.value, int)
        if alike and numbers and one.value != other.value:
            free = [(a, b) for a, b in ((one, other), (other, one)) if not _because(a)]
            others = [f"without '{a}': {b}" for a, b in free]
            return Infeasible("; ".join([*_told((one, other)), *others]))
    return None


def explain(problem: Problem, outcome: RunOutcome, solve: Solve) -> Infeasible:
    """The error to raise for a problem that `solve` found no plan for."""
    solve = _once(solve)
    free = solve(replace(problem, constraints=())) if problem.constraints else outcome
    if free.best is None:
        return Infeasible(_too_large(problem, free) + _without_headroom(problem, (), solve))
    conflict = _minimal(problem, solve)
    lines = _told(conflict)
    lines += [_relaxed(problem, conflict, item, solve) for item in conflict if not _because(item)]
    text = "; ".join(line for line in lines if line)
    return Infeasible(text + _without_headroom(problem, conflict, solve))


def _told(conflict: Sequence[Constraint]) -> list[str]:
    names = " and ".join(f"'{item}'" for item in conflict)
    because = [f"'{item}' is pinned since {why}" for item in conflict if (why := _because(item))]
    return [f"no plan meets {names}" + " together" * (len(conflict) > 1), *because]


def nearest(outcome: RunOutcome) -> str:
    """What the plan that exceeds memory by the least would need; nothing if there is none."""
    if outcome.least_excess is None:
        return ""
    excess, plan = outcome.least_excess
    assert plan.predicted
    peak = size(plan.predicted.peak_bytes)
    return f"; the nearest ({name_of(plan)}) needs {peak} on a rank, {size(excess)} too much"


def _once(solve: Solve) -> Solve:
    """Solves what differs in nothing but pins and objective once: that a pin is in conflict and
    what it would have to be are said by the same search."""
    known: dict[tuple[tuple[Constraint, ...], str], RunOutcome] = {}

    def found(problem: Problem) -> RunOutcome:
        asked = (problem.constraints, problem.objective)
        if asked not in known:
            known[asked] = solve(problem)
        return known[asked]

    return found


def _because(item: Constraint) -> str:
    """Why it is pinned, if the user did not."""
    return item.because if isinstance(item, Pin) else ""


def _too_large(problem: Problem, outcome: RunOutcome) -> str:
    where = f"{problem.cluster.num_devices} devices of {problem.cluster.name}"
    if outcome.least_excess is None:
        return f"no plan exists for a batch of {problem.batch} on the {where}"
    excess, plan = outcome.least_excess
    assert plan.predicted
    peak = plan.predicted.peak_bytes
    return (
        f"the model does not fit the {where}: the plan that needs least ({name_of(plan)}) needs "
        f"{size(peak)} on a rank, {size(excess)} more than there is; nearest: devices with "
        f"{size(peak)} free, more of them, or a smaller global batch than {problem.batch}"
    )


def _without_headroom(problem: Problem, kept: Sequence[Constraint], solve: Solve) -> str:
    """What would fit, and keep some pins, if no memory were kept free; empty if nothing would, or
    if none is, as where a pin says how much may be used."""
    if not problem.memory_headroom:
        return ""
    filled = solve(replace(problem, constraints=(*kept, _ALL))).best
    if filled is None or filled.predicted is None:
        return ""
    return (
        f"; {problem.memory_headroom:.0%} of memory is kept free: memory_headroom=0 "
        f"(--memory-headroom 0) has a plan that needs {size(filled.predicted.peak_bytes)} "
        f"({name_of(filled)}), and predictions of memory are off by some percent"
    )


def _minimal(problem: Problem, solve: Solve) -> tuple[Constraint, ...]:
    """A subset of the constraints in conflict, of which none can be left out."""
    kept = list(problem.constraints)
    for item in problem.constraints:
        fewer = tuple(other for other in kept if other != item)
        if fewer and solve(replace(problem, constraints=fewer)).best is None:
            kept.remove(item)
    return tuple(kept)


def _relaxed(
    problem: Problem, conflict: Sequence[Constraint], item: Constraint, solve: Solve
) -> str:
    """What the dropped constraint would have to be."""
    others = tuple(other for other in problem.constraints if other != item)
    if isinstance(item, MemoryCap):
        least = solve(replace(problem, constraints=others, objective="memory")).best
        if least is None or least.predicted is None:
            return ""
        return f"nearest cap: memory<={least.predicted.peak_bytes}B ({name_of(least)})"
    found = solve(replace(problem, constraints=others)).best
    if found is None:
        return ""
    if isinstance(item, StepCap):
        assert found.predicted
        return f"nearest cap: step<={found.predicted.step_s!r}s ({name_of(found)})"
    reason = plain_reason(problem, item)
    return f"{reason}{'; ' * bool(reason)}without '{item}': {_value_of(problem, item, found)}"


def plain_reason(problem: Problem, item: Constraint) -> str:
    """Why no plan has a pinned number, where arithmetic says so: too few devices or samples, or a
    size that cannot be shared out. Says the nearest that can; empty if it is not so simple."""
    if not isinstance(item, Pin) or item.relation != "=" or item.scope != EVERYWHERE:
        return ""
    asked = item.value if isinstance(item.value, tuple) else (item.value,)
    numbers = [value for value in asked if isinstance(value, int) and value > 0]
    if not numbers:
        return ""
    name, least = item.name, min(numbers)
    there, batch = problem.cluster.num_devices, problem.batch
    if name in (*STAGE_SIZES, "pp") and least > there:
        return f"{name} {least} needs as many devices, and the cluster has {there}"
    if name in REPLICAS and least > batch:
        return f"{least} replicas need a sample each, and the global batch is {batch}"
    if name in STAGE_SIZES and all(there % number for number in numbers):
        return (
            f"all stages have {name} {least} only where the number of devices is a multiple of it, "
            f"and the cluster has {there}{_nearest(least, there)}"
        )
    if name == "num_microbatches" and all(batch % number for number in numbers):
        return f"a global batch of {batch} has no {least} equal parts{_nearest(least, batch)}"
    return ""


def _nearest(number: int, whole: int) -> str:
    """The divisors of `whole` around a number that is none."""
    known = divisors(whole)
    around = (*[d for d in known if d < number][-1:], *[d for d in known if d > number][:1])
    return f"; nearest: {' and '.join(map(str, around))}"


def _value_of(problem: Problem, item: Constraint, plan: Plan) -> str:
    """What a plan does where the constraint wanted something else."""
    names = [block.name for block in problem.graph.blocks]
    if isinstance(item, OnStage) and item.block in names:
        for index, stage in enumerate(plan.stages):
            if names.index(item.block) <= names.index(stage.last):
                return f"block {item.block} on stage {index}"
    said = DECISIONS[item.name].explain(item.name, plan) if isinstance(item, Pin) else ""
    return said or name_of(plan)
