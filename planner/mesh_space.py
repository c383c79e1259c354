"""What every op, parameter and border may do on a mesh, before prices: combinations per axis.

On `cp` parameters are stored and used whole; on `ep` all parameters but those of experts are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph import Graph, Kind, Op
from meshwright.ir.layout import RP, Placement, R, Shard, Strategy
from meshwright.ir.plan import ModelMesh
from meshwright.planner.axis_layout import useful
from meshwright.planner.data_layout import DataLayout, is_state, taken_dims
from meshwright.planner.factors import AxisKind, Taken, strategies
from meshwright.planner.joint import Picks, joint_placements, joint_strategies
from meshwright.planner.placement_rules import NO_RULES, PlacementRules
from meshwright.planner.rules import name_of
from meshwright.planner.segments import PRELUDE, Segment, aliases
from meshwright.planner.spread import Shards, spread

Place = tuple[Placement, ...]
EXPERTS = "meshwright.experts"


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

    def sides(self, slot: int) -> list[Place]:
        """Per state: where a tensor of the op lies; inputs first, then outputs."""
        own = [[(*s.inputs, *s.outputs)[slot] for s in found] for found in self.found]
        return [tuple(o[i] for o, i in zip(own, pick, strict=True)) for pick in self.picks]


@dataclass(frozen=True, slots=True)
class MeshSpace:
    """All that can be chosen on one mesh."""

    mesh: ModelMesh
    segments: tuple[Segment, ...]
    """Without the prelude, which every rank computes whole."""
    ops: dict[str, OpSpace]
    """Per op name."""
    params: dict[str, tuple[Place, ...]]
    """Per tensor that blocks store: where it may lie."""
    borders: dict[str, tuple[Place, ...]]
    """Per value between blocks, by its common name: where it may lie. The first is whole."""
    alias: Callable[[str], str]


def mesh_space(
    graph: Graph, data: DataLayout, mesh: ModelMesh, asked: PlacementRules = NO_RULES
) -> MeshSpace:
    """The space of a mesh; `asked`: what constraints say of parameters."""
    found = tuple(s for s in data.segments if s.block.pattern != PRELUDE)
    alias, sizes = aliases(graph), tuple(size for _, size in mesh)
    taken = _taken(graph, data)
    each = [_axis(graph, found, mesh, at, taken, alias) for at in range(len(mesh))]
    rules = {name: rule for s in found for name, rule in s.rules.items()}
    ops = {
        op.name: OpSpace(op, own, joint_strategies(op, rules[op.name], graph, sizes, own))
        for s in found
        for op in s.ops
        for own in [tuple(axis.strategies[op.name] for axis in each)]
    }
    whole = (R,) * len(mesh)
    names = dict.fromkeys(name for s in found for name in s.block.params)
    params = {
        n: asked.places(n, mesh, _places(graph, n, sizes, [axis.stored(graph, n) for axis in each]))
        for n in names
    }
    early = {*graph.inputs, *(out for op in graph.prelude_ops for out in op.outputs)}
    borders = {
        root: (whole,)
        if name in early
        else _places(graph, name, sizes, [axis.handed_on(root) for axis in each])
        for root, name in _roots(graph, found, alias).items()
    }
    return MeshSpace(mesh, found, ops, params, borders, alias)


def _roots(graph: Graph, found: Iterable[Segment], alias: Callable[[str], str]) -> dict[str, str]:
    """Values between blocks: the common name, and one of the values."""
    names = (n for s in found for n in (*s.block.inputs, *s.block.outputs) if n != graph.loss)
    return {alias(name): name for name in names}


@dataclass(frozen=True, slots=True)
class _AxisSpace:
    """One axis of a mesh."""

    strategies: dict[str, tuple[Strategy, ...]]
    shards: Shards
    divides: Callable[[str], bool]
    """Whether a stored tensor may be split."""

    def stored(self, graph: Graph, name: str) -> list[Placement]:
        tensor = graph.tensors[name]
        if tensor.kind is not Kind.PARAMETER:
            return [R]
        shards = self.shards.get(name, {}) if self.divides(name) else {}
        return [R, *([RP] if tensor.requires_grad else []), *shards]

    def handed_on(self, root: str) -> list[Placement]:
        return [R, *self.shards.get(root, {})]


def _axis(
    graph: Graph, found: Sequence[Segment], mesh: ModelMesh, at: int, taken: Taken,
    alias: Callable[[str], str],
) -> _AxisSpace:  # fmt: skip
    axis, size = mesh[at]
    kind = AxisKind(size, outers=_outers(mesh, at))
    ops = [op for s in found for op in s.ops]
    rules = {name: rule for s in found for name, rule in s.rules.items()}
    splits, shards = spread(
        ops, rules, kind, taken=taken, seeds={}, natural=True, alias=alias,
        barred=lambda name: is_state(graph, name, parameters=False),
    )  # fmt: skip
    divides = _divides(graph, axis)
    every = {
        op.name: [
            s
            for s in strategies(op, rules[op.name], graph, kind, splits[op.name])
            if _keeps_whole(op, s, divides)
        ]
        for op in ops
    }
    kept: dict[str, tuple[Strategy, ...]] = {}
    for s in found:
        kept |= useful(s, every, set(), set())
    return _AxisSpace(kept, shards, divides)


def _outers(mesh: ModelMesh, at: int) -> tuple[int, ...]:
    """An axis may split inside the parts of any axes outside of it."""
    before = [size for _, size in mesh[:at]]
    found = {prod(some) for n in range(len(before) + 1) for some in combinations(before, n)}
    return tuple(sorted(found))


def _divides(graph: Graph, axis: str) -> Callable[[str], bool]:
    """Which tensors an axis may split, of those that are parameters."""
    experts = {name for op in graph.ops if name_of(op) == EXPERTS for name in op.inputs}

    def divides(name: str) -> bool:
        if graph.tensors[name].kind is not Kind.PARAMETER or axis.startswith("tp"):
            return True
        return axis == "ep" and name in experts

    return divides


def _keeps_whole(op: Op, strategy: Strategy, divides: Callable[[str], bool]) -> bool:
    pairs = zip(op.inputs, strategy.inputs, strict=True)
    return all(divides(name) for name, p in pairs if isinstance(p, Shard))


def _places(
    graph: Graph, name: str, sizes: tuple[int, ...], found: Sequence[Sequence[Placement]]
) -> tuple[Place, ...]:
    picks = joint_placements(graph, name, sizes, found)
    return tuple(tuple(own[i] for own, i in zip(found, pick, strict=True)) for pick in picks)


def _taken(graph: Graph, data: DataLayout) -> dict[str, dict[int, int]]:
    """Dims that dp splits, and the parts inside of which other axes split them."""
    found: dict[str, dict[int, int]] = {}
    for segment, laid in zip(data.segments, data.laid, strict=True):
        for name, dims in taken_dims(segment, laid, graph.batch_size).items():
            own = found.setdefault(name, {})
            for dim, parts in dims.items():
                own[dim] = lcm(own.get(dim, 1), parts)
    return found


def table(places: Sequence[Place]) -> tuple[list[Place], NDArray[np.int64]]:
    """The distinct places, and which of them each is."""
    numbers = {place: i for i, place in enumerate(dict.fromkeys(places))}
    return list(numbers), np.array([numbers[p] for p in places], np.int64)
