"""What would change a plan: questions, answered by pricing it again and by searching again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.fit.calibrated import calibrated
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.routed_graph import with_routing
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.profile import Profile
from meshwright.planner.problem.predict import DIGITS
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search
from meshwright.tools.explain.answers import Answer
from meshwright.tools.explain.vary import with_links, with_memory

LESS = 0.01
"""A plan that is faster by less is no better: the search's own tie is as wide."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A plan with all that it takes to search again."""

    plan: Plan
    cluster: Cluster
    graph: Callable[[int], Graph]
    """By global batch size."""
    profile: Profile | None
    time_limit_s: float

    @classmethod
    def of(
        cls, plan: Plan, cluster: Cluster, graph: Callable[[int], Graph],
        profile: Profile | None, time_limit_s: float,
    ) -> "Asked":  # fmt: skip
        """Links are varied as they were measured: then their records must not be read again."""
        if profile is not None:
            cluster = calibrated(cluster, profile)
            profile = replace(profile, collectives=())
        return cls(
            plan=plan, cluster=cluster, graph=cache(graph), profile=profile,
            time_limit_s=time_limit_s,
        )  # fmt: skip

    def answers(self) -> Iterator[Answer]:
        """One after the other: each takes up to the time limit."""
        batch = self.plan.global_batch_size
        yield self._answer("with 10 % more memory", with_memory(self.cluster, 1.1), batch)
        if self.cluster.num_nodes > 1:
            faster = with_links(self.cluster, 2.0, between=True)
            yield self._answer("at twice the bandwidth between nodes", faster, batch)
        if any(len(node.devices) > 1 for node in self.cluster.nodes):
            faster = with_links(self.cluster, 2.0, inside=True)
            yield self._answer("at twice the bandwidth inside nodes", faster, batch)
        yield self._answer("at double batch", self.cluster, 2 * batch)
        if self.plan.constraints:
            free = f"without what was asked for ({', '.join(self.plan.constraints)})"
            yield self._answer(free, self.cluster, batch, free=True)

    def _answer(self, question: str, cluster: Cluster, batch: int, *, free: bool = False) -> Answer:
        same_s = self._same_s(cluster) if batch == self.plan.global_batch_size else None
        found = self._found(cluster, batch, free=free)
        stays = same_s is not None and (
            found is None or _step_s(found) > same_s * (1 - LESS) or _alike(found, self.plan)
        )
        best_s = same_s if stays else _step_s(found) if found else None
        rate = batch / best_s if best_s else 0.0
        return Answer(
            question=question, samples=batch, same_s=same_s, best_s=best_s,
            best="" if stays or not found else name_of(found),
            peak_bytes=_peak(self.plan if stays or not found else found),
            change=rate / (self.plan.global_batch_size / _step_s(self.plan)) - 1,
        )  # fmt: skip

    def _same_s(self, cluster: Cluster) -> float:
        """Of this plan on other machines, with as many digits as plans have."""
        graph = with_routing(self.graph(self.plan.global_batch_size), self.plan.routing)
        tables = CostTables(
            graph, cluster, self.plan.precision, profile=self.profile, style=self.plan.style
        )
        return float(f"{estimate(graph, cluster, self.plan, tables)[0].step_s:.{DIGITS}g}")

    def _found(self, cluster: Cluster, batch: int, *, free: bool) -> Plan | None:
        plan = self.plan
        try:
            return search(
                self.graph(batch), cluster, optimizer=plan.optimizer, precision=plan.precision,
                max_grad_norm=plan.max_grad_norm, constraints=() if free else plan.constraints,
                time_limit_s=self.time_limit_s, seed=plan.evidence.seed if plan.evidence else 0,
                progress=False, profile=self.profile, routes=plan.routing,
            )  # fmt: skip
        except Infeasible:
            return None


def _step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def _peak(plan: Plan) -> int:
    assert plan.predicted
    return plan.predicted.peak_bytes


def _alike(one: Plan, other: Plan) -> bool:
    """Whether they do the same."""
    return (one.stages, one.schedule, one.layouts) == (other.stages, other.schedule, other.layouts)
