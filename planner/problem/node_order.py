"""One order of a mixed cluster's nodes for every search: how a user lists them decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.memo import Memos
from meshwright.ir.plan.plan import ClusterId, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.pins.constraints import Constraint, OnType, StageDevices
from meshwright.planner.problem.predict import in_detail, predict_plan
from meshwright.planner.problem.problem import Problem


@dataclass(frozen=True)
class Reordered:
    """A problem whose nodes are in that order, and the way back."""

    given: Problem
    problem: Problem
    ranks: Mapping[int, int]
    """Rank in the order -> rank in the cluster that was given."""

    def back(self, plan: Plan) -> Plan:
        """The plan on the cluster that was given."""
        if self.problem is self.given:
            return plan
        cluster = self.given.cluster
        stages = tuple(
            replace(stage, devices=tuple([self.ranks[rank] for rank in stage.devices]))
            for stage in plan.stages
        )
        plan = replace(
            plan, stages=stages, constraints=tuple(map(str, self.given.constraints)),
            cluster=ClusterId(
                name=cluster.name, fingerprint=cluster.fingerprint,
                num_devices=cluster.num_devices,
            ),
        )  # fmt: skip
        plan = replace(plan, predicted=predict_plan(self.given, plan))
        return rehash(in_detail(self.given, plan))


def in_one_order(problem: Problem) -> Reordered:
    """The problem with the nodes of a mixed cluster in the one order; itself if they are, or if
    pins name devices by number."""
    cluster = problem.cluster
    if any(isinstance(item, StageDevices) for item in problem.constraints):
        return Reordered(problem, problem, {})
    order = sorted(range(cluster.num_nodes), key=lambda n: (_key(cluster, cluster.nodes[n]), n))
    if order == list(range(cluster.num_nodes)):
        return Reordered(problem, problem, {})
    starts, end = [], 0
    for node in cluster.nodes:
        starts.append(end)
        end += len(node.devices)
    olds = [starts[n] + slot for n in order for slot in range(len(cluster.nodes[n].devices))]
    moved = replace(cluster, nodes=tuple(cluster.nodes[n] for n in order))
    news = {old: new for new, old in enumerate(olds)}
    tables = problem.tables
    again = replace(
        problem, cluster=moved, solved={}, laid={}, memos=Memos(),
        constraints=tuple(_moved(item, news) for item in problem.constraints),
        tables=CostTables(problem.graph, moved, problem.precision, profile=tables.profile,
                          style=tables.style)  # fmt: skip,
    )  # fmt: skip
    return Reordered(problem, again, dict(enumerate(olds)))


def _key(cluster: Cluster, node: Node) -> tuple[object, ...]:
    """Racks stay together; in each, what computes fastest comes first."""
    types = {device.name: device for device in cluster.device_types}
    peak = sum(max(types[name].peak_flops.values(), default=0.0) for name in node.devices)
    return node.rack, -peak, node.devices, repr(node.link), repr(node.uplink), node.cores


def _moved(item: Constraint, news: Mapping[int, int]) -> Constraint:
    if isinstance(item, OnType):
        return replace(item, ranks=tuple(sorted([news[rank] for rank in item.ranks])))
    return item
