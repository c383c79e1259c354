"""What to measure first, for a model whose plans differ by less than their predictions may err."""

from collections.abc import Sequence

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.narrowing import Narrowing, narrowings
from meshwright.forms.updates import USUAL
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.precision import USUAL as USUAL_PRECISION
from meshwright.ir.profile.profile import Profile
from meshwright.planner.pins.constraints import Constraint
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_finalists

_PLANS = 3


def measure_first(
    graph: Graph,
    cluster: Cluster,
    *,
    precision: str = USUAL_PRECISION,
    optimizer: str = USUAL,
    constraints: Sequence[str | Constraint] = (),
    profile: Profile | None = None,
    time_limit_s: float = 30.0,
) -> tuple[Narrowing, ...]:
    """Returns the measurements that narrow the bands of the best plans, most first.

    `profile`: what has been measured; what it knows is not named again. Infeasible says why there
    is no plan.
    """
    problem = make_problem(
        graph, cluster, optimizer=optimizer, precision=precision, constraints=tuple(constraints),
        profile=profile,
    )  # fmt: skip
    plans = search_finalists(problem, most=_PLANS, time_limit_s=time_limit_s)
    return narrowings(
        [estimate_all(problem.graph, problem.cluster, plan, problem.tables) for plan in plans]
    )
