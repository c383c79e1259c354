"""Different ways to lay out a model on a mesh: by prices, borders and weight of memory."""

import difflib
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.deadline import check_time
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.planner.inside.choose import Effort, choose
from meshwright.planner.inside.cluster_prices import OpTimes, cluster_regime
from meshwright.planner.inside.data_layout import DataLayout
from meshwright.planner.inside.layout_objective import Regime, usual
from meshwright.planner.inside.layouts import Solved, layouts_of
from meshwright.planner.inside.mesh_problem import MeshProblem, mesh_problem
from meshwright.planner.inside.mesh_space import MeshSpace, mesh_space
from meshwright.planner.inside.moves import Moves
from meshwright.planner.inside.prices import AlphaBeta
from meshwright.planner.pins.placement_rules import PlacementRules

CLOSE = 1e-3
"""Layouts are made for prices of a few regimes: on several axes, where proofs are dear, the last
thousandth is let go."""
LARGEST_SAMPLES = 8
LEAN = 4.0
"""Weight of memory of layouts that save it."""
EXPERTS = "ep"
"""The axis whose ranks may have samples of their own."""
OWN = {"own": 0.0, "own-lean": LEAN}
"""The variants in which they have, with the weight of memory."""


def sample_ranks_of(model: ModelMesh, variant: str) -> int:
    """Returns of how many samples a replica has a multiple in a variant."""
    return dict(model).get(EXPERTS, 1) if variant in OWN else 1


def takes(dp: int, model: ModelMesh, variant: str, samples: int) -> bool:
    """Returns whether all of so many replicas get some of a micro-batch's samples; equally many,
    where their ranks have samples of their own."""
    ranks = sample_ranks_of(model, variant)
    return dp <= samples and (ranks == 1 or samples % (dp * ranks) == 0)


def own_variants(model: ModelMesh, batch_size: int) -> tuple[str, ...]:
    """Returns the variants of a mesh in which ranks of a replica have samples of their own."""
    ranks = dict(model).get(EXPERTS, 1)
    return tuple(OWN) if ranks > 1 and batch_size % ranks == 0 else ()


def fast_variants(model: ModelMesh, batch_size: int, devices: int) -> tuple[str, ...]:
    """Returns the variants of least time: for a sample at once, where each message weighs most, and
    for as many as a rank can have."""
    most = most_samples(model, batch_size, devices)
    return ("fast", f"fast{most}") if most > 1 else ("fast",)


def most_samples(model: ModelMesh, batch_size: int, devices: int) -> int:
    """Returns how many samples a rank has when the whole batch is one micro-batch."""
    share = batch_size * prod(n for _, n in model) // devices
    return max(1, min(share, LARGEST_SAMPLES, batch_size))


@dataclass(frozen=True, slots=True)
class FoundVariant:
    """A way to lay out all patterns, and how good it is at its own prices."""

    layouts: tuple[BlockLayout, ...]
    cost_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a variant is made for."""

    prices: AlphaBeta | None
    """None: those of the cluster."""
    samples: int = 1
    memory: float = 0.0
    split: bool = True
    """Whether values between blocks may be split."""
    apart: str = ""
    """An axis whose ranks have samples of their own."""


@dataclass(frozen=True)
class MeshVariants:
    """The variants of one mesh, each solved when asked for."""

    graph: Graph
    tables: CostTables
    optimizer: str
    data: DataLayout
    model: ModelMesh
    asked: PlacementRules
    solved: dict[str, FoundVariant] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The usual one, whose name is empty, first; without those that equal one before."""
        kept: dict[str, tuple[BlockLayout, ...]] = {}
        for name in self._recipes:
            content = tuple(replace(x, name="") for x in self.found(name).layouts)
            if content not in kept.values():
                kept[name] = content
        return tuple(kept)

    def found(self, name: str) -> FoundVariant:
        if name not in self.solved:
            self.solved[name] = self._solve(name)
        return self.solved[name]

    def _solve(self, name: str) -> FoundVariant:
        check_time()
        if not self.model:
            return FoundVariant(layouts_of(self.graph, self.data, (), None), 0.0, 0.0)
        recipe = self._recipes.get(name)
        if recipe is None:
            near = difflib.get_close_matches(name, self._recipes, 1, 0.0)[0]
            raise PlanError(
                f"variant {name!r} of layouts is none of {', '.join(map(repr, self._recipes))}; "
                f"nearest is {near!r}"
            )
        problem = self._apart if recipe.apart else self._split if recipe.split else self._whole
        effort = Effort(gap=CLOSE if len(self.model) > 1 else 0.0)
        chosen = choose(problem.choices(self._regime(recipe)), effort)
        layouts = layouts_of(self.graph, self.data, self.model, Solved(problem, chosen), name)
        return FoundVariant(layouts, chosen.cost / 1e12, chosen.bound / 1e12)

    @cached_property
    def _recipes(self) -> dict[str, _Recipe]:
        """Per name."""
        # A single tensor axis is usual with whole borders; the others are for split values.
        usual_one = _Recipe(AlphaBeta(), split=any(axis != "tp" for axis, _ in self.model))
        if not self.model:
            return {"": usual_one}
        devices = self.tables.cluster.num_devices
        most = most_samples(self.model, self.graph.batch_size, devices)
        fast = fast_variants(self.model, self.graph.batch_size, devices)
        found = {
            "": usual_one,
            "halves": _Recipe(AlphaBeta(half_reduce=1.0)),
            **{name: _Recipe(None, samples=n) for name, n in zip(fast, (1, most), strict=False)},
            "lean": _Recipe(None, samples=most, memory=LEAN),
            "plain": _Recipe(None, samples=most, split=False),
        }
        for name in own_variants(self.model, self.graph.batch_size):
            ranks = sample_ranks_of(self.model, name)
            found[name] = _Recipe(None, samples=ranks, memory=OWN[name], apart=EXPERTS)
        return found

    def _regime(self, recipe: _Recipe) -> Regime:
        if recipe.prices is not None:
            return usual(self.model, recipe.prices)
        return cluster_regime(
            self._times, self.optimizer, self.model, recipe.samples, recipe.memory
        )

    @cached_property
    def _times(self) -> OpTimes:
        return OpTimes.of(self.tables)

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
    def _apart(self) -> MeshProblem:
        space = mesh_space(self.graph, self.data, self.model, self.asked, EXPERTS)
        return mesh_problem(self.graph, space, self._moves, split_borders=True)

    @cached_property
    def _whole(self) -> MeshProblem:
        return mesh_problem(self.graph, self._space, self._moves, split_borders=False)
