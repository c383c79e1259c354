"""The driver of every search: budget, verification, the best plan so far, evidence, progress."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

from meshwright.forms.retention import check as check_retention
from meshwright.forms.survival import part_named
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.garbage import rare_collections
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.beside import waits_for_collectives
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Improvement
from meshwright.ir.plan.verify import check
from meshwright.ir.precision import USUAL as USUAL_PRECISION
from meshwright.ir.profile.route_counts import RouteCounts
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.first_plans import first_choices
from meshwright.planner.bounds.bound import forget
from meshwright.planner.pins.constraints import broken, pinned
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.problem.node_order import in_one_order
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.deadline import TimeUp, check_time, until
from meshwright.planner.search.evidence import with_any_schedule, with_evidence
from meshwright.planner.search.finish import BEST, CLOSE, finished, hope_s, variants
from meshwright.planner.search.found import SearchLog as SearchLog
from meshwright.planner.search.found import close_to, pipelines, with_reason
from meshwright.planner.search.found import simplest as simplest
from meshwright.planner.search.infeasible import explain, plain_reason
from meshwright.planner.search.largest_batch import largest_batch
from meshwright.planner.search.objectives import bounds_batch, rating
from meshwright.planner.search.offers import Offer, check_logs, find_searcher, is_baseline
from meshwright.planner.search.options import SearchOptions
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.progress import ProgressLine
from meshwright.planner.search.ranking import Ranking, rank_clusters
from meshwright.planner.search.relieve import is_short, relieved, short_of
from meshwright.planner.search.surviving import surviving
from meshwright.planner.searchers.exhaustive import count
from meshwright.planner.synthesis.choose import asked_for, possible_s, synthesised

LATE, LATE_S = 0.25, 2.0
"""Of the time limit, and in seconds, what may be spent beyond it where there is no plan yet, or to
say why."""
SMALL = 1000
"""Choices up to which `auto` tries them all."""
FIRST = 8
"""Plans of equal stages that are looked at with things on the host: whether that may pay."""
FINALISTS = 5
"""Plans that are worth running if the fastest is wanted, the best one among them."""
PROMISING, PIPELINES = 16, 3
"""Plans, the best of their kind, that are looked at for how much a schedule made for them could
gain, and the most promising of them, for which one is made. On 39 published profiles and
clusters the three first by `_promise` held the best schedule of all, within 1 %."""


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
            _relieve(at, found, name, deadline)
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
    free = with_any_schedule(problem)
    deadline = time.monotonic() + time_limit_s
    name = _searcher(free, searcher, deadline)
    check_logs(problem, name)
    end = deadline + LATE * time_limit_s + LATE_S
    with ProgressLine(name, time_limit_s, show=progress) as shown:
        found = run(free, find_searcher(name)(free), deadline, shown)
        if found.best is None and not found.exhausted:
            _take_first(free, found, end, shown)
        if not is_baseline(name):
            _relieve(free, found, name, end if found.best is None else deadline)
        if free is not problem:
            found = _all_made(problem, found, deadline)
        elif not is_baseline(name):
            _improve(problem, found, deadline)
    if found.best is None:
        raise _why_none(problem, found, searcher, time_limit_s, end)
    best = _finish(problem, found, name, end)
    others = (
        with_evidence(problem, p, replace(found, best=p), name, end) for p in close_to(best, found)
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


def _take_first(problem: Problem, found: SearchLog, end: float, shown: ProgressLine) -> None:
    """Where time was up before there was a plan: plans of equal stages until one fits."""
    try:
        with until(end):
            for choice in first_choices(problem):
                _take(problem, Offer(plan=build_plan(problem, obey(problem, choice))), found)
                shown.update(found.candidates, found.best, found.bound_s)
                if found.best is not None:
                    return
    except TimeUp:
        return


def _relieve(problem: Problem, found: SearchLog, searcher: str, end: float) -> None:
    """Plans that keep things on the host, where memory is short."""

    def solve(asked: Problem) -> Plan | None:
        return run(asked, find_searcher(searcher)(asked), end).best

    def first(asked: Problem) -> Plan | None:
        log = SearchLog()
        for choice in islice(first_choices(asked), FIRST):
            _take(asked, Offer(plan=build_plan(asked, obey(asked, choice))), log)
            if log.best is not None:
                break
        return log.best

    if not is_short(found) and problem.objective != "memory":
        return
    try:
        with until(end):
            least_s = float("inf") if problem.objective == "memory" else found.least_s
            for plan in relieved(problem, solve, first, least_s):
                _take(problem, Offer(plan=plan), found)
            for choice in islice(first_choices(problem), FIRST if problem.rows else 0):
                base = build_plan(problem, obey(problem, choice))
                for plan in variants("cached_tables", problem, base):
                    _take(problem, Offer(plan=plan), found)
                if found.best is not None:
                    break
    except TimeUp:
        return


def _improve(problem: Problem, found: SearchLog, deadline: float) -> None:
    """What is tried on the best plans of a searcher."""
    try:
        with until(deadline):
            for plan in short_of(found):
                for name in ("host_memory", "cached_tables"):
                    for variant in variants(name, problem, plan):
                        _take(problem, Offer(plan=variant), found)
            _make_schedules(problem, found, deadline)
            _finish_best(problem, found, deadline)
    except TimeUp:
        return


def _why_none(
    problem: Problem, found: SearchLog, searcher: str, time_limit_s: float, end: float
) -> Infeasible:
    """Why there is no plan, if the time that is left is enough to say so."""
    looked = f"({found.candidates} looked at, time limit {time_limit_s:g} s)"
    if not found.exhausted:
        return Infeasible(
            f"no plan that fits and meets the pins was found {looked}; raise time_limit_s or pin "
            "decisions, such as tp=1"
        )

    def solve(relaxed: Problem) -> SearchLog:
        outcome = run(relaxed, find_searcher(_searcher(relaxed, searcher, end))(relaxed), end)
        if outcome.best is None and not outcome.exhausted and time.monotonic() > end:
            raise TimeUp
        _relieve(relaxed, outcome, _searcher(relaxed, searcher, end), end)
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


def run(
    problem: Problem,
    offers: Iterator[Offer],
    deadline: float = float("inf"),
    shown: ProgressLine | None = None,
) -> SearchLog:
    """Takes offers until they end, the deadline passes or Ctrl-C; keeps the best legal plan."""
    found = SearchLog()
    try:
        with until(deadline):
            for offer in offers:
                _take(problem, offer, found)
                if shown:
                    shown.update(found.candidates, found.best, found.bound_s)
                check_time()
            found.exhausted = _is_covered(found)
    except TimeUp:
        return found
    except KeyboardInterrupt:
        if found.best is None:
            raise
    return found


def _is_covered(found: SearchLog) -> bool:
    """Whether a search that has ended left nothing that could be better."""
    if found.open_s is None or found.best is None:
        return found.open_s in (None, float("inf"))
    assert found.best.predicted
    return found.open_s >= found.best.predicted.step_s


def _take(problem: Problem, offer: Offer, found: SearchLog) -> None:
    found.candidates += offer.candidates
    found.infeasible += offer.infeasible
    for reason, number in offer.pruned.items():
        found.pruned[reason] = found.pruned.get(reason, 0) + number
    found.open_s = found.open_s if offer.open_s is None else offer.open_s
    found.bound_s = found.bound_s if offer.bound_s is None else offer.bound_s
    plan = offer.plan
    if plan is None:
        return
    if broken(problem.constraints, plan, problem.graph):
        found.infeasible += 1
        return
    excess = excess_bytes(problem, plan)
    value = _value(problem, plan)
    found.note(value, excess, plan)
    if excess:
        found.infeasible += 1
        if found.least_excess is None or excess < found.least_excess[0]:
            found.least_excess = (excess, plan)
        return
    assert plan.predicted
    found.least_s = min(found.least_s, plan.predicted.step_s)
    if waits_for_collectives(plan):
        found.waiting_s = min(found.waiting_s, plan.predicted.step_s)
    found.keep(value, plan)
    if found.best is None or value < found.value:
        check(plan, problem.graph, problem.cluster)
        check_retention(plan)
        found.best, found.value = plan, value
        found.improved.append(_improvement(plan, found))


def _improvement(plan: Plan, found: SearchLog) -> Improvement:
    assert plan.predicted
    return Improvement(
        candidates=found.candidates, name=name_of(plan), step_s=plan.predicted.step_s,
        bound_s=None if found.bound_s is None else float(f"{found.bound_s:.6g}"),
    )  # fmt: skip


def _all_made(problem: Problem, found: SearchLog, deadline: float) -> SearchLog:
    """The best pipelines with schedules made for them, and nothing else."""
    made = replace(found, best=None, value=(), exhausted=False, least_excess=None)
    made.kinds, made.pipelines, made.lean, made.near, made.improved = {}, {}, {}, {}, []
    made.least_s = made.waiting_s = float("inf")
    made.open_s = None
    for plan in pipelines(found)[:PIPELINES]:
        if made.best is None or time.monotonic() < deadline:
            new = asked_for(problem, plan)
            if new:
                _take(problem, Offer(plan=new), made)
    return made


def _make_schedules(problem: Problem, found: SearchLog, deadline: float) -> None:
    """Schedules made for the best pipelines, and for what fits under no schedule of a file."""
    if problem.objective == "memory":
        return
    ranked = [(_promise(problem, p), n) for n, p in enumerate(pipelines(found)[:PROMISING])]
    plans = [pipelines(found)[n] for _, n in sorted(ranked)[:PIPELINES]]
    for plan in plans:
        if time.monotonic() < deadline:
            made = synthesised(problem, plan, below_s=found.least_s)
            if made:
                _take(problem, Offer(plan=made), found)


def _promise(problem: Problem, plan: Plan) -> float:
    """By which pipelines are compared: what one takes now and what it might come down to count
    alike. By the latter alone slow ones go first, of which next to nothing is known."""
    assert plan.predicted
    return plan.predicted.step_s * possible_s(problem, plan)


def _finish_best(problem: Problem, found: SearchLog, deadline: float) -> None:
    """The best plan of each kind with what is tried on good plans only, those after them of which
    that may make the best."""
    if problem.objective == "memory":
        return
    ranked = sorted(found.kinds.values(), key=lambda entry: (entry[1], entry[0]))
    hopes = {id(plan): hope_s(problem, plan) for _, _, plan in ranked}
    hopeful = [
        e for e in ranked[BEST:] if e[2].predicted and hopes[id(e[2])] < e[2].predicted.step_s
    ]
    hopeful.sort(key=lambda entry: (entry[1], hopes[id(entry[2])]))
    for _, excess, plan in (*ranked[:BEST], *hopeful[:BEST]):
        if not excess and hopes[id(plan)] > CLOSE * found.least_s:
            continue
        for variant in finished(problem, plan):
            _take(problem, Offer(plan=variant), found)
            if time.monotonic() > deadline:
                return


def _value(problem: Problem, plan: Plan) -> tuple[float, ...]:
    return (*rating(problem.objective, problem.cluster, plan), float(len(plan.stages)))


def _finish(problem: Problem, found: SearchLog, searcher: str, end: float = float("inf")) -> Plan:
    best = with_reason(simplest(problem, found), found)
    return with_evidence(problem, best, found, searcher, end)
