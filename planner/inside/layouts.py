"""Picks a strategy for every op: the batch on `dp` first, then all model axes together.

Equal blocks are solved once, and all patterns at once: a parameter that several patterns read and a
value that one hands to the next have one placement, the cheapest for all of them together.
"""

from dataclasses import dataclass

from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.layout.layout import RP, Placement, R, Strategy
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, param_key
from meshwright.planner.inside.axis_layout import LaidSegment
from meshwright.planner.inside.choices import Chosen
from meshwright.planner.inside.choose import choose
from meshwright.planner.inside.data_layout import DataLayout, solve_data
from meshwright.planner.inside.layout_objective import Regime, usual
from meshwright.planner.inside.mesh_problem import MeshProblem, mesh_problem
from meshwright.planner.inside.mesh_space import mesh_space
from meshwright.planner.inside.moves import Moves
from meshwright.planner.inside.segments import LayoutSegment
from meshwright.planner.pins.placement_rules import NO_RULES, PlacementRules


@dataclass(frozen=True, slots=True)
class Solved:
    """A choice for all patterns on one mesh."""

    problem: MeshProblem
    chosen: Chosen


def solve_layouts(
    graph: Graph,
    model: ModelMesh,
    regime: Regime | None = None,
    *,
    split_borders: bool = False,
    variant: str = "",
    asked: PlacementRules = NO_RULES,
    apart: str = "",
) -> tuple[BlockLayout, ...]:
    """One layout per pattern, the prelude first; `asked`: what constraints say of parameters;
    `apart`: an axis whose ranks have samples of their own."""
    data = solve_data(graph)
    solved = None
    if model:
        space = mesh_space(graph, data, model, asked, apart)
        moves = Moves(tuple(size for _, size in model))
        problem = mesh_problem(graph, space, moves, split_borders=split_borders)
        solved = Solved(problem, choose(problem.choices(regime or usual(model))))
    return layouts_of(graph, data, model, solved, variant)


def layouts_of(
    graph: Graph, data: DataLayout, model: ModelMesh, solved: Solved | None, variant: str = ""
) -> tuple[BlockLayout, ...]:
    """What was chosen, as texts."""
    axes = " ".join(f"{axis}{size}" for axis, size in model)
    name = " ".join(part for part in (axes or "tp1", variant) if part)
    return tuple(
        _Assembly(graph, data, model, segment, laid, solved).layout(name)
        for segment, laid in zip(data.segments, data.laid, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Assembly:
    """One pattern; what is replicated is left out."""

    graph: Graph
    data: DataLayout
    model: ModelMesh
    segment: LayoutSegment
    dp: LaidSegment
    solved: Solved | None

    def layout(self, name: str) -> BlockLayout:
        block = self.segment.block
        ops = {op.key: self._op(op.name) for op in self.segment.ops}
        return BlockLayout(
            name=f"{block.pattern} {name}",
            pattern=block.pattern,
            mesh=dict(self.model),
            parameters={
                param_key(block, self.graph.tensors[n].fqn): self._stored(n)
                for n in block.params
                if self.graph.tensors[n].kind is Kind.PARAMETER
            },
            inputs=tuple(self._border(n) for n in block.inputs),
            outputs=tuple(self._border(n) for n in block.outputs),
            ops={key: texts for key, texts in ops.items() if texts},
        )

    @property
    def _known(self) -> Solved | None:
        """The prelude is whole on all model axes."""
        return None if self.segment.block.pattern == PRELUDE else self.solved

    def _op(self, name: str) -> dict[str, str]:
        own = [self.dp.strategies[name]]
        if known := self._known:
            own += known.problem.strategy(known.chosen.states, name)
        axes = ("dp", *(axis for axis, _ in self.model))
        return {a: str(s) for a, s in zip(axes, own, strict=False) if not _is_whole(s)}

    def _stored(self, name: str) -> dict[str, str]:
        dp = RP if self.graph.tensors[name].requires_grad else R
        known = self._known
        return self._texts(dp, known.problem.stored(known.chosen.states, name) if known else ())

    def _border(self, name: str) -> dict[str, str]:
        dp, known = self.data.label(name), self._known
        if known is None or name == self.graph.loss:
            return self._texts(dp, ())
        root = known.problem.space.alias(name)
        return self._texts(dp, known.problem.border(known.chosen.states, root))

    def _texts(self, dp: Placement, model: tuple[Placement, ...]) -> dict[str, str]:
        axes = ("dp", *(axis for axis, _ in self.model))
        pairs = zip(axes, (dp, *model), strict=False)
        return {axis: str(p) for axis, p in pairs if p != R}


def _is_whole(strategy: Strategy) -> bool:
    return all(p == R for p in strategy.inputs + strategy.outputs)
