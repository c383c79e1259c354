"""What every op, parameter and border may do on one axis of a mesh, before prices.

On `cp` and `ep` parameters are stored and used whole, but for those of experts; on `cp` these are
used in parts only where tokens travel to them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import lcm, prod
from typing import Any, TypeVar

from meshwright.costmodel.ops.op_classes import is_view, looks_up
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.graph.rules import Rule
from meshwright.ir.layout.layout import RP, P, Placement, R, Shard, Strategy
from meshwright.ir.memo import Memo
from meshwright.ir.plan.folded import FOLDED
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.inside.axis_layout import useful
from meshwright.planner.inside.candidate_splits import Shards, spread
from meshwright.planner.inside.data_layout import DataLayout, is_state, taken_dims
from meshwright.planner.inside.expert_weights import expert_weights
from meshwright.planner.inside.factors import (
    AxisKind,
    Split,
    Taken,
    single_splits,
    split_strategy,
    strategies,
    units,
    with_together,
)
from meshwright.planner.inside.joint import OwnSplits
from meshwright.planner.inside.segments import LayoutSegment, aliases, tied

T = TypeVar("T")
_common: Memo[object, Any] = Memo()
MANY = 3
"""Axes from which on combinations are so many that equivalent ones are left out."""


@dataclass(frozen=True, slots=True)
class AxisSpace:
    """One axis of a mesh."""

    strategies: dict[str, tuple[Strategy, ...]]
    """Per op name."""
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


@dataclass(frozen=True)
class Spreader:
    """Finds the splits of all blocks on axis after axis of a mesh."""

    graph: Graph
    data: DataLayout
    mesh: ModelMesh
    apart: str = ""
    """An axis whose ranks have samples of their own: all that has samples is split as on dp."""

    @cached_property
    def segments(self) -> tuple[LayoutSegment, ...]:
        """Without the prelude, which every rank computes whole."""
        return tuple(s for s in self.data.segments if s.block.pattern != PRELUDE)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for s in self.segments for op in s.ops)

    @cached_property
    def rules(self) -> dict[str, Rule | None]:
        return {name: rule for s in self.segments for name, rule in s.rules.items()}

    def _once(self, key: object, make: Callable[[], T]) -> T:
        """What meshes have in common is made for the first that asks."""
        known = _common.of(self.data)
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    @cached_property
    def alias(self) -> Callable[[str], str]:
        return self._once("alias", lambda: aliases(self.graph))

    @cached_property
    def tied(self) -> Callable[[str], str]:
        return self._once("tied", lambda: tied(self.graph))

    @cached_property
    def taken(self) -> Taken:
        """Dims that dp splits, and the parts inside of which other axes split them."""
        return self._once("taken", self._taken)

    def _taken(self) -> Taken:
        found: dict[str, dict[int, int]] = {}
        for segment, laid in zip(self.data.segments, self.data.laid, strict=True):
            for name, dims in taken_dims(segment, laid, self.graph.batch_size).items():
                own = found.setdefault(name, {})
                for dim, parts in dims.items():
                    own[dim] = lcm(own.get(dim, 1), parts)
        return found

    @cached_property
    def heavy(self) -> frozenset[str]:
        """Ops whose work or whose results are worth splitting."""
        return frozenset(op.name for op in self.ops if op.flops or looks_up(op.target))

    def starts(self, op: Op) -> bool:
        """Whether an op starts splits of its own: on one axis all do, on several, where
        combinations are many, the heavy ones, and others follow them."""
        return len(self.mesh) < 2 or not self.heavy or op.name in self.heavy

    def spread(self, kind: AxisKind) -> tuple[dict[str, tuple[Split, ...]], Shards]:
        key = "spread", kind, len(self.mesh) < 2
        return self._once(key, lambda: self._spread(kind))

    def _spread(self, kind: AxisKind) -> tuple[dict[str, tuple[Split, ...]], Shards]:
        return spread(
            self.ops, self.rules, kind, taken=self.taken, seeds={}, natural=self.starts,
            alias=self.alias,
            barred=lambda name: is_state(self.graph, name, parameters=False),
        )  # fmt: skip

    def axis(self, at: int) -> AxisSpace:
        """What may be done on one axis, beside whatever the others do; the same on all axes of one
        size that are for the same."""
        axis, size = self.mesh[at]
        kind = AxisKind(size, outers=self._outers(at), zigzag=_evens_out(axis))
        family = "tp" if axis.startswith("tp") else axis
        key = "axis", kind, family, min(len(self.mesh), MANY), axis == self.apart
        return self._once(key, lambda: self._axis(kind, axis))

    def _axis(self, kind: AxisKind, axis: str) -> AxisSpace:
        splits, shards = self.spread(kind)
        divides = _divides(self.graph, axis)
        own = self.sampled(kind) if axis == self.apart else {}
        every = {
            op.name: [
                s
                for s in own.get(op.name)
                or strategies(op, self.rules[op.name], self.graph, kind, splits[op.name])
                if _keeps_whole(op, s, divides) and (len(self.mesh) < MANY or _is_needed(op, s))
                if axis != "cp" or _splits_values(op, s, self.graph)
            ]
            for op in self.ops
        }
        if axis == self.apart:
            borders = {root: dict.fromkeys(kept) for root, kept in self._labels.items()}
            stored = {name: kept for name, kept in shards.items() if name not in borders}
            return AxisSpace({n: tuple(s) for n, s in every.items()}, stored | borders, divides)
        kept: dict[str, tuple[Strategy, ...]] = {}
        for segment in self.segments:
            kept |= useful(segment, every, set(), set())
        return AxisSpace(kept, shards, divides)

    def sampled(self, kind: AxisKind) -> dict[str, list[Strategy]]:
        """Of each op that has samples: that of dp, and what it may bring together inside."""
        found: dict[str, list[Strategy]] = {}
        for op in self.ops:
            data, rule = self._data[op.name], self.rules[op.name]
            if not any(isinstance(p, Shard) for p in (*data.inputs, *data.outputs)):
                continue
            found[op.name] = [data]
            if rule is None or not rule.together:
                continue
            batch = AxisKind(1, self.graph.batch_size)
            for split in self.data.splits[op.name]:
                if split_strategy(op, rule, self.graph, split, batch) == data:
                    found[op.name] += [
                        split_strategy(op, rule, self.graph, both, kind)
                        for both in with_together(rule, split, kind)
                        if both != split and _has_units(rule, both, kind)
                    ]
        return found

    @cached_property
    def _data(self) -> Mapping[str, Strategy]:
        return self._once(
            "data", lambda: {n: s for laid in self.data.laid for n, s in laid.strategies.items()}
        )

    @cached_property
    def _labels(self) -> Mapping[str, tuple[Shard, ...]]:
        """How dp splits values between blocks, and within them, by their common name."""
        return self._once("labels", self._placed_on_dp)

    def _placed_on_dp(self) -> dict[str, tuple[Shard, ...]]:
        found: dict[str, dict[Shard, None]] = {}
        for op in self.ops:
            data = self._data[op.name]
            sides = zip((*op.inputs, *op.outputs), (*data.inputs, *data.outputs), strict=True)
            for name, placed in sides:
                if name and isinstance(placed, Shard):
                    found.setdefault(self.alias(name), {})[placed] = None
        return {name: tuple(placed) for name, placed in found.items()}

    def _outers(self, at: int) -> tuple[int, ...]:
        """An axis may split inside the parts of any of the others, twice as many if in zigzag."""
        others = [each for i, each in enumerate(self.mesh) if i != at]
        found = set[int]()
        for some in (c for n in range(len(others) + 1) for c in combinations(others, n)):
            parts = prod(size for _, size in some)
            found |= {parts, 2 * parts if self.zigzags(some) else parts}
        return tuple(sorted(found))

    def zigzags(self, axes: ModelMesh) -> bool:
        """Whether one of these axes may split something in zigzag."""
        uneven = any(rule and rule.uneven for rule in self.rules.values())
        return uneven and any(_evens_out(axis) for axis, _ in axes)

    @cached_property
    def alone(self) -> Mapping[str, OwnSplits]:
        """Per value, by its common name: how an axis may split it that is alone."""
        known: dict[str, set[tuple[int, int, bool]]] = {}
        for kind in dict.fromkeys(AxisKind(n, zigzag=_evens_out(axis)) for axis, n in self.mesh):
            for name, own in self.spread(kind)[1].items():
                known.setdefault(name, set()).update((s.dim, s.outer, s.zigzag) for s in own)
        for name, placed in self._labels.items() if self.apart else ():
            known.setdefault(name, set()).update((s.dim, s.outer, s.zigzag) for s in placed)
        return {name: frozenset(own) for name, own in known.items()}


def _has_units(rule: Rule, split: Split, kind: AxisKind) -> bool:
    """Whether each rank has some of what is split, that of samples aside."""
    return all(kind.admits(units(rule, one)) for one in single_splits(rule, split))


def _evens_out(axis: str) -> bool:
    """Whether ranks of an axis may have early and late parts of a sequence."""
    return axis == "cp"


def _divides(graph: Graph, axis: str) -> Callable[[str], bool]:
    """Which tensors an axis may split, of those that are parameters."""
    experts = expert_weights(graph) if axis in FOLDED else {}

    def divides(name: str) -> bool:
        if graph.tensors[name].kind is not Kind.PARAMETER or axis.startswith("tp"):
            return True
        return name in experts

    return divides


def _keeps_whole(op: Op, strategy: Strategy, divides: Callable[[str], bool]) -> bool:
    pairs: Sequence[tuple[str, Placement]] = list(zip(op.inputs, strategy.inputs, strict=True))
    return all(divides(name) for name, p in pairs if isinstance(p, Shard))


def _splits_values(op: Op, strategy: Strategy, graph: Graph) -> bool:
    """Whether parameters are split only where a value is that they meet: experts along a sequence,
    whose tokens travel."""
    pairs = zip(op.inputs, strategy.inputs, strict=True)
    split = {graph.tensors[n].kind is Kind.PARAMETER for n, p in pairs if isinstance(p, Shard)}
    return split != {True}


def _is_needed(op: Op, strategy: Strategy) -> bool:
    """Summands are summed up before a view as well as behind it; one of the two is enough."""
    passes = any(p in (P, RP) for p in (*strategy.inputs, *strategy.outputs))
    return not is_view(op.target) or not passes
