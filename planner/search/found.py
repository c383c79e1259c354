"""What a run of a searcher has seen, and which of it is the best plan."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.forms.retention import check as check_retention
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Improvement
from meshwright.ir.plan.verify import check
from meshwright.planner.pins.known import machinery
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.offers import tie
from meshwright.planner.search.plan_comparison import kind_of, name_of


@dataclass
class SearchLog:
    """What a run has seen so far."""

    best: Plan | None = None
    value: tuple[float, ...] = ()
    candidates: int = 0
    infeasible: int = 0
    exhausted: bool = False
    pruned: dict[str, int] = field(default_factory=dict)
    bound_s: float | None = None
    """No choice at all takes less, as the searcher says."""
    open_s: float | None = None
    """Nothing that was neither judged nor pruned takes less, as the searcher says."""
    least_s: float = float("inf")
    """The shortest step of a plan that fits."""
    waiting_s: float = float("inf")
    """The same of those that wait for their collectives (`ir.plan.beside`)."""
    least_excess: tuple[int, Plan] | None = None
    """The plan that exceeds memory by the least."""
    kinds: dict[str, tuple[tuple[float, ...], int, Plan]] = field(default_factory=dict)
    """Best of each kind: value, excess memory, plan."""
    pipelines: dict[tuple[str, int, bool], tuple[tuple[float, ...], int, Plan]] = field(
        default_factory=dict
    )
    """The same of pipelines, for each order of stages: schedules are made for given orders."""
    lean: dict[tuple[int, ...], tuple[tuple[float, ...], Plan]] = field(default_factory=dict)
    """Of the plans that fit, the best with each amount of machinery."""
    near: dict[str, tuple[tuple[float, ...], Plan]] = field(default_factory=dict)
    """By name, the best of the plans that fit and were close to the shortest step when found."""
    improved: list[Improvement] = field(default_factory=list)

    def keep(self, value: tuple[float, ...], plan: Plan) -> None:
        """Notes a plan that fits."""
        if _is_near(plan, self.least_s):
            near = self.near.get(name := name_of(plan))
            if near is None or value < near[0]:
                self.near[name] = value, plan
        held = self.lean.get(_machinery(plan))
        if held is None or value < held[0]:
            self.lean[_machinery(plan)] = value, plan

    def note(self, value: tuple[float, ...], excess_bytes: int, plan: Plan) -> None:
        """Notes a plan, whether it fits or not."""
        entry = value, excess_bytes, plan
        kind = kind_of(plan)
        _keep_better(self.kinds, kind, entry)
        if len(plan.schedule.rows) > 1:
            _keep_better(self.pipelines, (kind, *_order(plan)), entry)


def simplest(problem: Problem, found: SearchLog) -> Plan:
    """Of the plans that tie with the best, the one with the least machinery (`Decision.machinery`):
    replicas that agree as ZeRO says, then the lowest level of that, then fewest kinds of meshes,
    then fewest stages, then fewest model axes, then no halves of micro-batches; then the fastest.
    """
    assert found.best and found.best.predicted
    if problem.objective not in ("throughput", "batch"):
        return found.best
    limit_s = found.best.predicted.step_s * (1 + tie(problem))
    _, best = min(
        (entry for entry in found.lean.values() if entry[0][0] <= limit_s),
        key=lambda entry: (_machinery(entry[1]), entry[0]),
    )
    check(best, problem.graph, problem.cluster)
    check_retention(best)
    return best


NEAR = 0.05
"""Plans that are predicted to take so much more than the best may be faster: about the error of
predictions where costs were measured (docs/results/accuracy.md)."""


def _is_near(plan: Plan, least_s: float) -> bool:
    assert plan.predicted
    return plan.predicted.step_s <= least_s * (1 + NEAR)


def close_to(best: Plan, found: SearchLog) -> Iterator[Plan]:
    """Other plans for as many ranks that may be as fast, best first; no two that run alike."""
    seen = {executed(best)}
    for _, plan in sorted(found.near.values(), key=lambda entry: entry[0]):
        if not _is_near(plan, found.least_s) or plan.world_size != best.world_size:
            continue
        if (run := executed(plan)) not in seen:
            seen.add(run)
            yield plan


def executed(plan: Plan) -> Hashable:
    """What is run: with one micro-batch some schedules are the same under several names."""
    return repr(plan.stages), plan.num_microbatches, plan.schedule.rows


def with_reason(best: Plan, found: SearchLog) -> Plan:
    """The plan with a note if another one is faster."""
    fastest = found.best
    assert best.predicted and fastest and fastest.predicted
    faster = best.predicted.step_s / fastest.predicted.step_s - 1
    if fastest is best or faster <= 0:
        return best
    gain = f"{faster:.2%} faster, and the time of a step varies by more"
    note = (
        f"chosen because it is simpler: {name_of(fastest)} is predicted "
        f"{gain if faster >= 5e-5 else 'as fast'}"
    )
    return replace(best, notes=(*best.notes, note))


def _machinery(plan: Plan) -> tuple[int, ...]:
    return tuple([one.of(plan) for one in machinery()])


def pipelines(found: SearchLog) -> list[Plan]:
    """The best of each kind and order of stages, best first."""
    ranked = sorted(found.pipelines.values(), key=lambda entry: (entry[1], entry[0]))
    return [plan for _, _, plan in ranked]


def _order(plan: Plan) -> tuple[int, bool]:
    """Stages on a pipeline rank, and whether the last stage is on the first one's devices (a V)."""
    return len(plan.stages) // len(plan.schedule.rows), (
        plan.stages[0].devices == plan.stages[-1].devices
    )


_Entry = tuple[tuple[float, ...], int, Plan]


def _keep_better(held: dict[Any, _Entry], key: Any, entry: _Entry) -> None:
    if key not in held or (entry[1], *entry[0]) < (held[key][1], *held[key][0]):
        held[key] = entry
