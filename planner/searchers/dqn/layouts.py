"""The cheapest layout that keeps to what is decided of the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.layout.layout import Placement
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.planner.inside.choices import BlockProblem, Chosen, Reader, ValueEdge
from meshwright.planner.inside.choose import Effort, choose
from meshwright.planner.inside.cluster_prices import OpTimes, cluster_regime
from meshwright.planner.inside.layouts import Solved, layouts_of
from meshwright.planner.inside.mesh_problem import MeshProblem, NodeKey, mesh_problem
from meshwright.planner.inside.mesh_space import MeshSpace, mesh_space
from meshwright.planner.inside.moves import Moves
from meshwright.planner.pins.constraints import placement_rules
from meshwright.planner.problem.problem import Problem

Bools = NDArray[np.bool_]
CLOSE = 1e-3
"""How far from the cheapest a completed layout may be."""


@dataclass(frozen=True, slots=True)
class Completer:
    """Fills in what decisions about parameters leave open, on one mesh at the cluster's prices."""

    problem: Problem
    model: ModelMesh
    mesh: MeshProblem
    choices: BlockProblem

    @classmethod
    def of(cls, problem: Problem, model: ModelMesh, samples: int) -> "Completer":
        graph = problem.graph
        asked = placement_rules(problem.constraints, graph)
        space = mesh_space(graph, problem.data, model, asked)
        mesh = mesh_problem(graph, space, Moves(tuple(n for _, n in model)), split_borders=True)
        timer = OpTimes(problem.tables, problem.cluster.device(0))
        regime = cluster_regime(timer, problem.optimizer, model, samples, 0.0)
        return cls(problem, model, mesh, mesh.choices(regime))

    @property
    def space(self) -> MeshSpace:
        return self.mesh.space

    def chosen(self, left: Mapping[str, Bools]) -> Chosen:
        """The cheapest with these places of parameters."""
        nodes = {self.mesh.nodes[NodeKey("param", name)]: keep for name, keep in left.items()}
        smaller = restricted(self.choices, nodes)
        found = choose(smaller, Effort(gap=CLOSE))
        states = list(found.states)
        for node, keep in nodes.items():
            states[node] = int(np.flatnonzero(keep)[states[node]])
        return replace(found, states=tuple(states))

    def places(self, left: Mapping[str, Bools]) -> dict[str, Sequence[Placement]]:
        """Where the cheapest has these parameters."""
        states = self.chosen(left).states
        nodes = self.mesh.nodes
        return {name: self.space.params[name][states[nodes[NodeKey("param", name)]]]
                for name in left}  # fmt: skip

    def layouts(self, chosen: Chosen, variant: str) -> tuple[BlockLayout, ...]:
        solved = Solved(self.mesh, chosen)
        return layouts_of(self.problem.graph, self.problem.data, self.model, solved, variant)


def restricted(choices: BlockProblem, kept: Mapping[int, Bools]) -> BlockProblem:
    """With fewer states of some nodes."""
    costs = tuple(
        cost[kept[node]] if node in kept else cost for node, cost in enumerate(choices.costs)
    )
    return BlockProblem(costs, tuple(_link(link, kept) for link in choices.links))


def _link(link: ValueEdge, kept: Mapping[int, Bools]) -> ValueEdge:
    made = link.made[kept[link.source]] if link.source in kept else link.made
    readers: Sequence[Reader] = [
        Reader(r.node, r.wants[kept[r.node]] if r.node in kept else r.wants) for r in link.readers
    ]
    return ValueEdge(link.source, made, tuple(readers), link.price)
