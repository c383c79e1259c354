"""The driver of every search: budget, verification, the best plan so far, evidence, progress."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshwright.ir.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Evidence, Plan
from meshwright.ir.plan_io import rehash
from meshwright.ir.profile import Profile
from meshwright.ir.profile_store import load_profile
from meshwright.ir.trace import trace
from meshwright.ir.verify import check
from meshwright.planner.bound import lower_bound
from meshwright.planner.constraints import Constraint, broken
from meshwright.planner.infeasible import explain
from meshwright.planner.offers import Offer, find_searcher
from meshwright.planner.predict import excess_bytes
from meshwright.planner.problem import Problem, make_problem
from meshwright.planner.progress import Progress
from meshwright.planner.searchers.exhaustive import count
from meshwright.planner.why import alternative, kind_of

SMALL = 1000
"""Choices up to which `auto` tries them all."""
ALTERNATIVES = 6
TIE = 0.02
"""Plans whose predicted steps differ by less are a tie: then the simplest is best."""


def search(
    model_or_graph: Any,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    searcher: str = "auto",
    constraints: Sequence[str | Constraint] = (),
    objective: str = "throughput",
    time_limit_s: float = 60,
    seed: int = 0,
    progress: bool = True,
    profile: Profile | Path | str | None = None,
) -> Plan:
    """The best plan found within the time limit for a module, or for a Graph from `trace`.

    `profile`: what was measured of the cluster's machines, or the file that holds it. Ctrl-C gives
    the best plan so far. Within the limit, equal arguments give equal plans.
    """
    graph = _graph(model_or_graph, example_inputs, loss_fn, global_batch_size)
    problem = make_problem(
        graph, cluster, optimizer=optimizer, precision=precision,
        constraints=tuple(constraints), objective=objective, seed=seed,
        profile=load_profile(profile) if isinstance(profile, str | Path) else profile,
    )  # fmt: skip
    if time_limit_s <= 0:
        raise PlanError(f"time_limit_s is {time_limit_s}; it must be positive, such as 60")
    return search_problem(problem, searcher, time_limit_s=time_limit_s, progress=progress)


def _graph(
    given: Any, example_inputs: Any, loss_fn: Callable[..., Any] | None, batch: int | None
) -> Graph:
    if not isinstance(given, Graph):
        return trace(given, example_inputs, loss_fn, global_batch_size=batch)
    if batch is not None and batch != given.batch_size:
        raise PlanError(
            f"global_batch_size {batch}, but the graph was traced at {given.batch_size}: trace the "
            "model again at the batch size wanted"
        )
    return given


def search_problem(
    problem: Problem, searcher: str = "auto", *, time_limit_s: float = 60, progress: bool = False
) -> Plan:
    """`search` on a problem that is already made."""
    name = searcher
    if name == "auto":
        name = "exhaustive" if count(problem, SMALL) <= SMALL else "dp"
    deadline = time.monotonic() + time_limit_s
    with Progress(name, time_limit_s, show=progress) as shown:
        found = run(problem, find_searcher(name)(problem), deadline, shown)
    if found.best is None:
        if not found.exhausted:
            raise Infeasible(
                f"no plan that fits was found in {time_limit_s:g} s ({found.candidates} looked at);"
                " raise time_limit_s or pin decisions, such as tp=1"
            )
        raise explain(problem, found, lambda relaxed: run(relaxed, find_searcher(name)(relaxed)))
    return _finish(problem, found, name)


@dataclass
class Found:
    """What a run has seen so far."""

    best: Plan | None = None
    value: tuple[float, ...] = ()
    candidates: int = 0
    infeasible: int = 0
    exhausted: bool = False
    least_excess: tuple[int, Plan] | None = None
    """The plan that exceeds memory by the least."""
    kinds: dict[str, tuple[tuple[float, ...], int, Plan]] = field(default_factory=dict)
    """Best of each kind: value, excess memory, plan."""


def run(
    problem: Problem,
    offers: Iterator[Offer],
    deadline: float = float("inf"),
    shown: Progress | None = None,
) -> Found:
    """Takes offers until they end, the deadline passes or Ctrl-C; keeps the best legal plan."""
    found = Found()
    try:
        for offer in offers:
            _take(problem, offer, found)
            if shown:
                shown.update(found.candidates, found.best)
            if time.monotonic() > deadline:
                break
        else:
            found.exhausted = True
    except KeyboardInterrupt:
        if found.best is None:
            raise
    return found


def _take(problem: Problem, offer: Offer, found: Found) -> None:
    found.candidates += offer.candidates
    found.infeasible += offer.infeasible
    plan = offer.plan
    if plan is None:
        return
    if broken(problem.constraints, plan, problem.graph):
        found.infeasible += 1
        return
    excess = excess_bytes(problem, plan)
    value = _value(problem, plan)
    kind = kind_of(plan)
    held = found.kinds.get(kind)
    if held is None or (excess, *value) < (held[1], *held[0]):
        found.kinds[kind] = (value, excess, plan)
    if excess:
        found.infeasible += 1
        if found.least_excess is None or excess < found.least_excess[0]:
            found.least_excess = (excess, plan)
    elif found.best is None or value < found.value:
        check(plan, problem.graph, problem.cluster)
        found.best, found.value = plan, value


def _value(problem: Problem, plan: Plan) -> tuple[float, ...]:
    assert plan.predicted
    time_and_memory = (plan.predicted.step_s, float(plan.predicted.peak_bytes))
    if problem.objective == "memory":
        time_and_memory = (time_and_memory[1], time_and_memory[0])
    return (*time_and_memory, float(len(plan.stages)))


def _simplest(problem: Problem, found: Found) -> Plan:
    """Of the best plans of each kind that tie with the best, the one with the least machinery:
    fewest stages, then the lowest ZeRO level, then the fastest."""
    assert found.best and found.best.predicted
    if problem.objective != "throughput":
        return found.best
    limit_s = found.best.predicted.step_s * (1 + TIE)
    tied = [(value, p) for value, excess, p in found.kinds.values() if not excess]
    _, best = min(
        (entry for entry in tied if entry[0][0] <= limit_s),
        key=lambda entry: (_machinery(entry[1]), entry[0]),
    )
    check(best, problem.graph, problem.cluster)
    return best


def _machinery(plan: Plan) -> tuple[int, int]:
    return len(plan.stages), max(stage.zero for stage in plan.stages)


def _finish(problem: Problem, found: Found, searcher: str) -> Plan:
    """The best plan with its evidence, versions and hash."""
    best = _simplest(problem, found)
    assert best.predicted
    bound = float(f"{lower_bound(problem):.6g}")
    others = [entry for entry in found.kinds.values() if kind_of(entry[2]) != kind_of(best)]
    others.sort(key=lambda entry: (entry[1] > 0, *entry[0]))
    evidence = Evidence(
        searcher=searcher,
        seed=problem.seed,
        candidates=found.candidates,
        infeasible=found.infeasible,
        exhausted=found.exhausted,
        bound_s=bound,
        gap=float(f"{best.predicted.step_s / bound - 1:.6g}") if bound else 0.0,
        alternatives=tuple(alternative(p, best, extra) for _, extra, p in others[:ALTERNATIVES]),
    )
    return rehash(replace(best, evidence=evidence, versions=_versions()))


def _versions() -> dict[str, str]:
    """Of the installed packages that a plan depends on; run from a checkout, ours has none."""
    found = {}
    for name in ("meshwright", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
