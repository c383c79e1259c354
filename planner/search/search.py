"""The driver of every search: budget, verification, the best plan so far, evidence, progress."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

from meshwright.forms.stepping import check_updates, update_findings
from meshwright.forms.survival import part_named
from meshwright.forms.tables import check_tables, table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.deadline import TimeUp, until
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.garbage import rare_collections
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import USUAL as USUAL_PRECISION
from meshwright.ir.profile.route_counts import RouteCounts
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.ir.trace.within import traced_within
from meshwright.planner.bounds.bound import forget
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.problem.node_order import in_one_order
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.evidence import with_any_schedule, with_evidence
from meshwright.planner.search.found import SearchLog, close_to, simplest, with_reason
from meshwright.planner.search.improve import all_made, improve, relieve, take_first
from meshwright.planner.search.infeasible import explain, known_conflict, nearest, plain_reason
from meshwright.planner.search.largest_batch import largest_batch
from meshwright.planner.search.objectives import bounds_batch
from meshwright.planner.search.offers import check_logs, find_searcher, is_baseline
from meshwright.planner.search.options import SearchOptions
from meshwright.planner.search.progress import ProgressLine
from meshwright.planner.search.ranking import Ranking, rank_clusters
from meshwright.planner.search.surviving import surviving
from meshwright.planner.search.take import run
from meshwright.planner.searchers.exhaustive import count

LATE, LATE_S = 0.25, 2.0
"""Of the time limit, and in seconds, what may be spent beyond it where there is no plan yet, or to
say why."""
SMALL = 1000
"""Choices up to which `auto` tries them all."""
FINALISTS = 5
"""Plans that are worth running if the fastest is wanted, the best one among them."""


def search(
    model_or_graph: Any,
    cluster: Cluster | Sequence[Cluster],
    options: SearchOptions | None = None,
    **more: Any,
) -> Plan:
    """Finds the best plan within the time limit for a module, or for a Graph from `trace`.

    Of several clusters, the plan on the best one (`rank` shows them all). Options are keyword
    arguments, or one `SearchOptions`, where each is explained. Ctrl-C gives the best plan so far.
    Within the limit, equal arguments give equal plans.
    """
    clusters = [cluster] if isinstance(cluster, Cluster) else cluster
    return rank(model_or_graph, clusters, SearchOptions.of(options, **more)).best


def rank(
    model_or_graph: Any,
    clusters: Sequence[Cluster],
    options: SearchOptions | None = None,
    **more: Any,
) -> Ranking:
    """Finds the best plan on each cluster, best cluster first; options as in `search`."""
    asked = SearchOptions.of(options, **more)
    measured, rows = asked.measured(), RowCounts.load(asked.rows)
    routes = RouteCounts.load(asked.routes)
    given = isinstance(model_or_graph, Graph)
    # A graph has what it was traced with.
    said = asked.kernels if asked.kernels is not None or not given else ()
    names, wins = kernels_for(clusters, said, asked.style)
    precision = asked.precision or ("" if given else USUAL_PRECISION)

    @cache
    def graph(batch: int | None) -> Graph:
        if not isinstance(model_or_graph, Graph):
            with traced_within(asked.time_limit_s):
                return trace(
                    model_or_graph, asked.example_inputs, asked.loss_fn, global_batch_size=batch,
                    kernels=names, wins=wins, precision=precision,
                )  # fmt: skip
        _check_graph(model_or_graph, batch, names)
        return model_or_graph

    def problem(cluster: Cluster, batch: int | None, pins: Sequence[str] = ()) -> Problem:
        return make_problem(
            graph(batch), cluster, optimizer=asked.optimizer, precision=precision,
            max_grad_norm=asked.max_grad_norm, constraints=(*asked.constraints, *pins),
            objective=asked.objective, allow=tuple(asked.allow), rows=rows, seed=asked.seed,
            profile=measured, routes=routes, style=asked.style,
            memory_headroom=asked.memory_headroom,
            log_dir=asked.log_dir(cluster.name, several=len(clusters) > 1),
        )  # fmt: skip

    def solve(cluster: Cluster) -> tuple[Plan, ...]:
        first = problem(cluster, asked.global_batch_size)
        if asked.objective == "batch":
            _check_traceable(model_or_graph)
            at_batch = partial(problem, cluster)
            return (_largest(at_batch, first, asked.searcher, asked.time_limit_s),)

        def solve_pinned(pins: Sequence[str], time_limit_s: float) -> tuple[Plan, ...]:
            pinned_problem = problem(cluster, asked.global_batch_size, pins) if pins else first
            return search_finalists(
                pinned_problem, asked.searcher, asked.finalists, time_limit_s=time_limit_s,
                progress=asked.progress,
            )  # fmt: skip

        if asked.survives:
            part = part_named(asked.survives)
            return surviving(solve_pinned, cluster, part, asked.time_limit_s)
        return solve_pinned((), asked.time_limit_s)

    return rank_clusters(clusters, asked.objective, solve)


def _check_traceable(given: Any) -> None:
    if isinstance(given, Graph):
        raise PlanError(
            "objective 'batch' traces the model at several batch sizes: give the module, not a "
            "Graph"
        )


def _largest(
    problem: Callable[[int], Problem], first: Problem, searcher: str, time_limit_s: float
) -> Plan:
    """The plan of the largest batch; for a batch of one unit that does not fit, why."""
    if not (first.coupling or bounds_batch(first.constraints)):
        raise PlanError(
            "objective 'batch': with more micro-batches any batch fits; limit num_microbatches, "
            "such as num_microbatches=1, or the time of a step, such as step<=1s"
        )
    unit = int(pinned(first.constraints, "num_microbatches") or 1)
    deadline = time.monotonic() + time_limit_s

    def plan_at(batch: int) -> Plan | None:
        asked = in_one_order(problem(batch))
        at = asked.problem
        name = _searcher(at, searcher, deadline)
        found = run(at, find_searcher(name)(at), deadline)
        if found.best is None:
            relieve(at, found, name, deadline)
        if found.best is None and not is_baseline(name):
            improve(at, found, deadline)
        return asked.back(_finish(at, found, name)) if found.best else None

    best = largest_batch(plan_at, first.batch, unit, lambda: time.monotonic() < deadline)
    return best or search_problem(problem(unit), searcher, time_limit_s=time_limit_s)


def _check_graph(graph: Graph, batch: int | None, kernels: tuple[str, ...]) -> None:
    if batch is not None and batch != graph.batch_size:
        raise PlanError(
            f"global_batch_size {batch}, but the graph was traced at {graph.batch_size}: trace the "
            "model again at the batch size wanted"
        )
    if kernels:
        raise PlanError(
            f"kernels {', '.join(kernels)} are put in while a model is traced: give the module, or "
            "give them to `trace`"
        )


def search_problem(
    problem: Problem, searcher: str = "auto", *, time_limit_s: float = 60, progress: bool = False
) -> Plan:
    """`search` on a problem that is already made."""
    asked = search_finalists(problem, searcher, 1, time_limit_s=time_limit_s, progress=progress)
    return asked[0]


@rare_collections(set_aside=True)
def search_finalists(
    problem: Problem,
    searcher: str = "auto",
    most: int = FINALISTS,
    *,
    time_limit_s: float = 60,
    progress: bool = False,
) -> tuple[Plan, ...]:
    """The best plan, then up to `most - 1` that are predicted to take little more, best first."""
    asked = in_one_order(problem)
    found = _finalists(asked.problem, searcher, most, time_limit_s, progress=progress)
    return tuple(asked.back(plan) for plan in found)


def _finalists(
    problem: Problem, searcher: str, most: int, time_limit_s: float, *, progress: bool
) -> tuple[Plan, ...]:
    if ruled_out := known_conflict(problem):
        raise ruled_out
    free = with_any_schedule(problem)
    deadline = time.monotonic() + time_limit_s
    name = _searcher(free, searcher, deadline)
    check_logs(problem, name)
    end = deadline + LATE * time_limit_s + LATE_S
    with ProgressLine(name, time_limit_s, show=progress) as shown:
        found = run(free, find_searcher(name)(free), deadline, shown)
        late = time.monotonic() > deadline  # then what is found at once goes before stores
        if found.best is None and not found.exhausted and late:
            take_first(free, found, end, shown)
            deadline = end
        if not is_baseline(name):
            relieve(free, found, name, end if found.best is None else deadline)
        if found.best is None and not found.exhausted and not late:
            take_first(free, found, end, shown)
        if free is problem:
            if not is_baseline(name):
                improve(problem, found, deadline)
        elif found.best is not None or not found.exhausted:
            found = all_made(problem, found, deadline)
    if found.best is None:
        # What rules out pipelines rules out schedules made for them.
        asked = free if found.exhausted else problem
        raise _why_none(asked, found, searcher, time_limit_s, end, late=late)
    best = _finish(problem, found, name, end)
    # What a pin asks for may be refused beside the model's shapes, as jobs refuse it.
    check_updates(best, problem.graph)
    check_tables(best, problem.graph)
    others = (
        with_evidence(problem, p, replace(found, best=p), name, end)
        for p in close_to(best, found)
        if not any((*update_findings(p, problem.graph), *table_findings(p, problem.graph)))
    )
    finalists = (best, *islice(others, most - 1))
    forget(problem)
    return finalists


def _searcher(problem: Problem, name: str, deadline: float = float("inf")) -> str:
    if name != "auto":
        return name
    if len(problem.graph.blocks) > SMALL:
        return "ilp"
    try:
        with until(deadline):
            return "exhaustive" if count(problem, SMALL) <= SMALL else "ilp"
    except TimeUp:
        return "ilp"


def _why_none(
    problem: Problem,
    found: SearchLog,
    searcher: str,
    time_limit_s: float,
    end: float,
    *,
    late: bool,
) -> Infeasible:
    """Why there is no plan, if the time that is left is enough to say so."""
    looked = f"({found.candidates} looked at, time limit {time_limit_s:g} s)"
    if not found.exhausted:
        more = "raise time_limit_s or " * late
        return Infeasible(
            f"no plan that fits and meets the pins was found {looked}{nearest(found)}; {more}pin "
            "decisions, such as tp=1"
        )

    def solve(relaxed: Problem) -> SearchLog:
        outcome = run(relaxed, find_searcher(_searcher(relaxed, searcher, end))(relaxed), end)
        if outcome.best is None and not outcome.exhausted and time.monotonic() > end:
            raise TimeUp
        relieve(relaxed, outcome, _searcher(relaxed, searcher, end), end)
        return outcome

    try:
        # What is left of the constraints may be too much for the searcher that fits all of them.
        return explain(problem, found, solve)
    except TimeUp:
        for item in problem.constraints:
            if reason := plain_reason(problem, item):
                return Infeasible(f"no plan meets '{item}': {reason}")
        return Infeasible(
            f"no plan fits and meets the pins {looked}; time was up before it was known which of "
            "them are in conflict: raise time_limit_s to be told"
        )


def _finish(problem: Problem, found: SearchLog, searcher: str, end: float = float("inf")) -> Plan:
    best = with_reason(simplest(problem, found), found)
    return with_evidence(problem, best, found, searcher, end)
