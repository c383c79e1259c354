"""What every op, parameter and border may do on a mesh, before prices: combinations per axis."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.layout.layout import Placement, R, Strategy
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.inside.axis_space import AxisSpace, Spreader
from meshwright.planner.inside.data_layout import DataLayout
from meshwright.planner.inside.joint import Picks, joint_placements, joint_strategies
from meshwright.planner.inside.segments import LayoutSegment
from meshwright.planner.pins.placement_rules import NO_RULES, PlacementRules

Place = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class OpSpace:
    """The joint strategies of an op."""

    op: Op
    found: tuple[tuple[Strategy, ...], ...]
    """Per axis."""
    picks: Picks

    def strategy(self, state: int) -> tuple[Strategy, ...]:
        """Per axis."""
        return tuple(own[i] for own, i in zip(self.found, self.picks[state], strict=True))

    def placements(self, slot: int) -> list[list[Placement]]:
        """Per axis and strategy: where a tensor of the op lies; inputs first, then outputs."""
        return [[(*s.inputs, *s.outputs)[slot] for s in found] for found in self.found]


@dataclass(frozen=True, slots=True)
class MeshSpace:
    """All that can be chosen on one mesh."""

    mesh: ModelMesh
    segments: tuple[LayoutSegment, ...]
    """Without the prelude, which every rank computes whole."""
    ops: dict[str, OpSpace]
    """Per op name."""
    params: dict[str, tuple[Place, ...]]
    """Per tensor that blocks store, by its common name: where it may lie."""
    borders: dict[str, tuple[Place, ...]]
    """Per value between blocks, by its common name: where it may lie. The first is whole."""
    alias: Callable[[str], str]
    """The common name of values between blocks."""
    tied: Callable[[str], str]
    """The common name of tensors that are stored alike."""
    dp: dict[str, Strategy]
    """Per op name: how samples are split."""


def mesh_space(
    graph: Graph,
    data: DataLayout,
    mesh: ModelMesh,
    asked: PlacementRules = NO_RULES,
    apart: str = "",
) -> MeshSpace:
    """The space of a mesh; `asked`: what constraints say of parameters; `apart`: an axis whose
    ranks have samples of their own."""
    spreader = Spreader(graph, data, mesh, apart)
    each = tuple(spreader.axis(at) for at in range(len(mesh)))
    maker = _SpaceMaker(graph, spreader, each)
    stored: dict[str, dict[str, None]] = {}
    for name in (name for s in spreader.segments for name in s.block.params):
        stored.setdefault(spreader.tied(name), {})[name] = None
    return MeshSpace(
        mesh=mesh,
        segments=spreader.segments,
        ops={op.name: maker.op(op) for op in spreader.ops},
        params={
            root: _common([asked.places(name, mesh, maker.stored(name)) for name in names])
            for root, names in stored.items()
        },
        borders=maker.borders(),
        alias=spreader.alias,
        tied=spreader.tied,
        dp={name: s for laid in data.laid for name, s in laid.strategies.items()},
    )


def _common(found: list[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places that all uses of a tensor allow."""
    return tuple(place for place in found[0] if all(place in other for other in found[1:]))


@dataclass(frozen=True, slots=True)
class _SpaceMaker:
    graph: Graph
    spreader: Spreader
    each: tuple[AxisSpace, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.spreader.mesh)

    def op(self, op: Op) -> OpSpace:
        found = tuple(axis.strategies[op.name] for axis in self.each)
        rule = self.spreader.rules[op.name]
        names = [self.spreader.alias(name) if name else "" for name in (*op.inputs, *op.outputs)]
        alone = [self.spreader.alone.get(name, frozenset()) for name in names]
        return OpSpace(op, found, joint_strategies(op, rule, self.graph, self.sizes, found, alone))

    def stored(self, name: str) -> tuple[Place, ...]:
        return self._places(name, [axis.stored(self.graph, name) for axis in self.each])

    def borders(self) -> dict[str, tuple[Place, ...]]:
        """What comes from the prelude or the batch is whole."""
        graph, whole = self.graph, ((R,) * len(self.each),)
        early = {*graph.inputs, *(out for op in graph.prelude_ops for out in op.outputs)}
        names = (n for s in self.spreader.segments for n in (*s.block.inputs, *s.block.outputs))
        roots = {self.spreader.alias(name): name for name in names if name != graph.loss}
        return {
            root: whole
            if name in early
            else self._places(name, [axis.handed_on(root) for axis in self.each])
            for root, name in roots.items()
        }

    def _places(self, name: str, found: list[list[Placement]]) -> tuple[Place, ...]:
        alone = self.spreader.alone.get(self.spreader.alias(name), frozenset())
        picks = joint_placements(self.graph, name, self.sizes, found, alone)
        return tuple(tuple(own[i] for own, i in zip(found, pick, strict=True)) for pick in picks)
