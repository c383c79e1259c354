"""A new, detailed prediction of a plan that has been run, and what the run teaches a profile."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.arguments.targets import cluster_of, load_target
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.explain.compare import Comparison, compare
from meshwright.costmodel.explain.expected import block_uses, expected_in_detail, group_shape
from meshwright.costmodel.fit.learn import learn
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.routed_graph import with_routing
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import check
from meshwright.ir.profile.measured import Measured
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile, open_store
from meshwright.ir.trace.trace import trace


@dataclass(frozen=True, slots=True)
class Details:
    """A run, and what it takes to predict it again."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    runs: tuple[Measured, ...]

    @classmethod
    def of(
        cls, plan: Plan, target: str, cluster: str | None, runs: tuple[Measured, ...]
    ) -> "Details":
        """TARGET must be the plan's model; the cluster is found by name unless one is given."""
        found = load_target(target, meta=True)
        graph = trace(
            found.model,
            found.example_inputs,
            found.loss_fn,
            global_batch_size=plan.global_batch_size,
            kernels=plan.kernels,
            precision=plan.precision,
        )
        check(plan, graph)
        return cls(plan, graph, cluster_of(plan, cluster), runs)

    def compared(self, profile: Path | None) -> Comparison:
        """With a prediction by the profile, if one is given."""
        found = load_profile(profile, self.runs[0].machine) if profile else None
        return self._compared(self._tables(found))

    def teach(self, path: Path) -> tuple[Comparison, Comparison, int]:
        """Folds the run into the profile in a file: comparisons before and after, records."""
        machine = self.runs[0].machine
        before = load_profile(path, machine)
        tables = self._tables(before)
        expected, _ = expected_in_detail(self.plan, tables, self.runs)
        records = learn(
            before,
            self.plan,
            block_uses(self.plan, tables),
            expected,
            self.runs,
            lambda stage, axis: group_shape(self.plan, self.cluster, stage, axis),
            slow=slowdown(self.cluster),
        )
        with open_store(path) as store:
            store.add(machine, *records)
        after = self._compared(self._tables(load_profile(path, machine)))
        return compare(self.plan, expected, self.runs), after, len(records)

    def _tables(self, profile: Profile | None) -> CostTables:
        plan, graph = self.plan, with_routing(self.graph, self.plan.routing)
        return CostTables(graph, self.cluster, plan.precision, profile=profile, style=plan.style)

    def _compared(self, tables: CostTables) -> Comparison:
        expected, _ = expected_in_detail(self.plan, tables, self.runs)
        return compare(self.plan, expected, self.runs)
