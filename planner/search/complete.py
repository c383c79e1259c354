"""A hand-written plan made whole: what it leaves open is searched, and the whole is priced."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import USUAL as USUAL_PRECISION
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.ir.profile.route_counts import RouteCounts, RoutesGiven
from meshwright.ir.text.canonical import parse_json, read_text
from meshwright.ir.trace.trace import trace
from meshwright.ir.trace.within import traced_within
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.handwritten import (
    Minimal,
    check_batch,
    check_devices,
    is_minimal,
    parse_minimal,
)
from meshwright.planner.search.offers import find_searcher
from meshwright.planner.search.search import search_problem
from meshwright.planner.search.take import run


def complete(
    given: Mapping[str, Any] | str | Path,
    model_or_graph: Any,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    time_limit_s: float = 60,
    progress: bool = False,
    profile: Profile | Path | str | None = None,
    routes: RoutesGiven = None,
) -> Plan:
    """The best plan that keeps what is given: `complete({"tp": 4, "pp": 2}, model, cluster)`.

    `given` is a mapping or a JSON file; unknown keys are errors. `profile` and `routes` are as
    `search` takes them. Infeasible says what conflicts.
    """
    with traced_within(time_limit_s):
        problem = minimal_problem(
            given, model_or_graph, cluster, global_batch_size=global_batch_size,
            example_inputs=example_inputs, loss_fn=loss_fn, profile=profile, routes=routes,
        )  # fmt: skip
    return search_problem(problem, time_limit_s=time_limit_s, progress=progress)


def minimal_problem(
    given: Mapping[str, Any] | str | Path,
    model_or_graph: Any,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    profile: Profile | Path | str | None = None,
    routes: RoutesGiven = None,
) -> Problem:
    """The search that a hand-written plan asks for."""
    where = str(given) if isinstance(given, str | Path) else "plan"
    data = read_minimal(given) if isinstance(given, str | Path) else given
    asked = parse_minimal(data, where)
    check_devices(data, cluster.num_devices, where)
    batch = _batch(asked, global_batch_size, where)
    graph = model_or_graph
    if not isinstance(graph, Graph):
        names, wins = kernels_for([cluster], stack=asked.settings.get("style", ""))
        graph = trace(
            model_or_graph, example_inputs, loss_fn, global_batch_size=batch,
            precision=asked.settings.get("precision", USUAL_PRECISION),
            kernels=names, wins=wins,
        )  # fmt: skip
    elif batch not in (None, graph.batch_size):
        raise PlanError(
            f"{where}: global_batch_size {batch}, but the graph was traced at {graph.batch_size}"
        )
    check_batch(data, graph.batch_size, where)
    settings = {k: v for k, v in asked.settings.items() if k != "global_batch_size"}
    measured = load_profile(profile) if isinstance(profile, str | Path) else profile
    return make_problem(
        graph, cluster, constraints=asked.constraints, profile=measured,
        routes=RouteCounts.load(routes), **settings,
    )  # fmt: skip


def read_minimal(path: str | Path) -> Mapping[str, Any]:
    """A hand-written plan from a file."""
    data = parse_json(read_text(path), str(path))
    if not is_minimal(data):
        raise PlanError(
            f"{path}: is no hand-written plan, an object such as "
            '{"tp": 4, "pp": 2, "dp_shard": 8}, but has keys of a whole plan'
        )
    return data  # type: ignore[no-any-return]


def least_excess(problem: Problem, time_limit_s: float) -> Plan | None:
    """Of the plans that keep all constraints but do not fit, the one that needs least memory, as
    far as was looked within the limit."""
    found = run(problem, find_searcher("ilp")(problem), time.monotonic() + time_limit_s)
    return found.least_excess[1] if found.best is None and found.least_excess else None


def _batch(asked: Minimal, given: int | None, where: str) -> int | None:
    written: int | None = asked.settings.get("global_batch_size")
    if given is not None and written not in (None, given):
        raise PlanError(
            f"{where}: global_batch_size is {written}, but {given} was asked for; keep one of them"
        )
    return written if given is None else given
