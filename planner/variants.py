"""Different ways to lay out a model on a mesh: by prices, borders and weight of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from meshwright.costmodel.tables import CostTables
from meshwright.ir.graph import Graph
from meshwright.ir.plan import BlockLayout, ModelMesh
from meshwright.planner.choose import Effort, choose
from meshwright.planner.cluster_prices import cluster_regime
from meshwright.planner.data_layout import DataLayout
from meshwright.planner.layouts import Solved, layouts_of
from meshwright.planner.mesh_problem import MeshProblem, mesh_problem
from meshwright.planner.mesh_space import MeshSpace, mesh_space
from meshwright.planner.moves import Moves
from meshwright.planner.placement_rules import PlacementRules
from meshwright.planner.prices import AlphaBeta
from meshwright.planner.regime import Regime, usual

CLOSE = 1e-3
"""Layouts are made for prices of a few regimes: on several axes, where proofs are dear, the last
thousandth is let go."""
LARGEST_SAMPLES = 8
LEAN = 4.0
"""Weight of memory of layouts that save it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A way to lay out all patterns, and how good it is at its own prices."""

    layouts: tuple[BlockLayout, ...]
    cost_s: float
    bound_s: float


@dataclass(frozen=True)
class MeshVariants:
    """The variants of one mesh, each solved when asked for."""

    graph: Graph
    tables: CostTables
    optimizer: str
    data: DataLayout
    model: ModelMesh
    asked: PlacementRules
    solved: dict[str, Found] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The usual one, whose name is empty, first; without those that equal one before."""
        kept: dict[str, tuple[BlockLayout, ...]] = {}
        for name, _, _ in self._recipes():
            content = tuple(replace(x, name="") for x in self.found(name).layouts)
            if content not in kept.values():
                kept[name] = content
        return tuple(kept)

    def found(self, name: str) -> Found:
        if name not in self.solved:
            self.solved[name] = self._solve(name)
        return self.solved[name]

    def _solve(self, name: str) -> Found:
        if not self.model:
            return Found(layouts_of(self.graph, self.data, (), None), 0.0, 0.0)
        regime, split = next((r, s) for n, r, s in self._recipes() if n == name)
        problem = self._split if split else self._whole
        effort = Effort(gap=CLOSE if len(self.model) > 1 else 0.0)
        chosen = choose(problem.choices(regime), effort)
        layouts = layouts_of(self.graph, self.data, self.model, Solved(problem, chosen), name)
        return Found(layouts, chosen.cost / 1e12, chosen.bound / 1e12)

    def _recipes(self) -> Iterator[tuple[str, Regime, bool]]:
        """Name, prices, whether borders may be split."""
        usually_split = any(axis != "tp" for axis, _ in self.model)
        other = "whole" if usually_split else "split"
        yield "", usual(self.model), usually_split
        if not self.model:
            return
        yield other, usual(self.model), not usually_split
        yield "halves", usual(self.model, AlphaBeta(half_reduce=1.0)), True
        most = self._most_samples()
        yield "fast", self._regime(1, 0.0), True
        if most > 1:
            yield f"fast{most}", self._regime(most, 0.0), True
        yield "lean", self._regime(most, LEAN), True
        yield "plain", self._regime(most, 0.0), False

    def _regime(self, samples: int, memory: float) -> Regime:
        return cluster_regime(self.tables, self.optimizer, self.model, samples, memory)

    def _most_samples(self) -> int:
        """On a rank when the whole batch is one micro-batch."""
        size = prod(n for _, n in self.model)
        share = self.graph.batch_size * size // self.tables.cluster.num_devices
        return max(1, min(share, LARGEST_SAMPLES, self.graph.batch_size))

    @cached_property
    def _space(self) -> MeshSpace:
        return mesh_space(self.graph, self.data, self.model, self.asked)

    @cached_property
    def _moves(self) -> Moves:
        return Moves(tuple(size for _, size in self.model))

    @cached_property
    def _split(self) -> MeshProblem:
        return mesh_problem(self.graph, self._space, self._moves, split_borders=True)

    @cached_property
    def _whole(self) -> MeshProblem:
        return mesh_problem(self.graph, self._space, self._moves, split_borders=False)
