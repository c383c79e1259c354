"""A mesh's space as a choice: who chooses, which values link them, and what that costs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import Placement, R, Strategy
from meshwright.planner.inside.axis_layout import PICOSECONDS
from meshwright.planner.inside.choices import BlockProblem, Reader, ValueEdge
from meshwright.planner.inside.data_layout import results
from meshwright.planner.inside.layout_objective import Regime
from meshwright.planner.inside.mesh_costs import move_seconds, op_seconds, stored_seconds
from meshwright.planner.inside.mesh_space import MeshSpace, OpSpace
from meshwright.planner.inside.moves import Moves, MoveTable, Places
from meshwright.planner.inside.segments import LayoutSegment

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Place = tuple[Placement, ...]


class NodeKey(NamedTuple):
    """Who chooses."""

    kind: str
    """`op`, `param` or `border`."""
    name: str


@dataclass(frozen=True, slots=True)
class UnpricedEdge:
    """A link before prices."""

    name: str
    source: int
    made: Ints
    readers: tuple[Reader, ...]
    table: MoveTable
    repeats: int
    """Blocks that have such a value."""


@dataclass(frozen=True, slots=True)
class MeshProblem:
    """All nodes and values of a space."""

    graph: Graph
    space: MeshSpace
    borders: Mapping[str, tuple[Place, ...]]
    """Where values between blocks may lie; the first place is whole."""
    nodes: Mapping[NodeKey, int]
    repeats: Mapping[NodeKey, int]
    """How many there are of each node: blocks of the op's pattern, tensors like this one."""
    values: tuple[UnpricedEdge, ...]

    def choices(self, regime: Regime) -> BlockProblem:
        """The problem at some prices."""
        costs = tuple(self._cost(node, regime) for node in self.nodes)
        known: dict[object, Floats] = {}
        links = tuple(
            ValueEdge(
                value.source, value.made, value.readers,
                _picoseconds(
                    move_seconds(self.graph, self.space, regime, value.name, value.table, known),
                    value.repeats,
                ),
            )
            for value in self.values
        )  # fmt: skip
        return BlockProblem(costs, links)

    def _cost(self, node: NodeKey, regime: Regime) -> Ints:
        if node.kind == "border":
            return np.zeros(len(self.borders[node.name]), np.int64)
        if node.kind == "param":
            seconds = stored_seconds(self.graph, self.space, regime, node.name)
        else:
            seconds = op_seconds(self.graph, self.space.ops[node.name], self.space, regime)
        return _picoseconds(seconds, self.repeats[node])

    def strategy(self, states: Sequence[int], op: str) -> tuple[Strategy, ...]:
        """Per axis."""
        return self.space.ops[op].strategy(states[self.nodes[NodeKey("op", op)]])

    def stored(self, states: Sequence[int], name: str) -> Place:
        root = self.space.tied(name)
        return self.space.params[root][states[self.nodes[NodeKey("param", root)]]]

    def border(self, states: Sequence[int], root: str) -> Place:
        return self.borders[root][states[self.nodes[NodeKey("border", root)]]]


def _picoseconds(seconds: Floats, times: int) -> Ints:
    return np.round(seconds * (times * PICOSECONDS)).astype(np.int64)


def mesh_problem(
    graph: Graph, space: MeshSpace, moves: Moves, *, split_borders: bool
) -> MeshProblem:
    """The problem of a mesh; with whole borders, values between blocks are not split."""
    whole = ((R,) * len(space.mesh),)
    borders = {n: p if split_borders else whole for n, p in space.borders.items()}
    maker = _EdgeMaker(graph, space, moves, borders | {"": whole})
    for name, count in _copies(graph, space):
        maker.add("param", name, count)
    for root in maker.borders:
        maker.add("border", root, 1)
    repeats = Counter(block.pattern for block in graph.blocks)
    for segment in space.segments:
        maker.segment(segment, repeats[segment.block.pattern])
    return MeshProblem(graph, space, maker.borders, maker.nodes, maker.repeats, tuple(maker.values))


def _copies(graph: Graph, space: MeshSpace) -> Iterator[tuple[str, int]]:
    """How many different tensors have each common name."""
    every = dict.fromkeys(name for block in graph.blocks for name in block.params)
    counts = Counter(map(space.tied, every))
    for name in space.params:
        yield name, counts[name]


class _Placed(NamedTuple):
    """Where a value lies, or is wanted, in each state of a node."""

    node: int
    places: Places


@dataclass(slots=True)
class _EdgeMaker:
    """Nodes and values in the making."""

    graph: Graph
    space: MeshSpace
    moves: Moves
    borders: dict[str, tuple[Place, ...]]
    """The loss, which has the empty name, included."""
    nodes: dict[NodeKey, int] = field(default_factory=dict)
    repeats: dict[NodeKey, int] = field(default_factory=dict)
    values: list[UnpricedEdge] = field(default_factory=list)

    def add(self, kind: str, name: str, repeats: int) -> int:
        key = NodeKey(kind, name)
        self.nodes[key], self.repeats[key] = len(self.nodes), repeats
        return self.nodes[key]

    def segment(self, segment: LayoutSegment, repeats: int) -> None:
        """The ops of a block, and the values between them and what it reads and hands on."""
        made, wanted = self._read(segment), dict[str, list[_Placed]]()
        for op in segment.ops:
            own, node = self.space.ops[op.name], self.add("op", op.name, repeats)
            for i, name in enumerate(op.inputs):
                wanted.setdefault(name, []).append(self._side(node, own, i))
            for i, name in enumerate(op.outputs, len(op.inputs)):
                if name:
                    made[name] = self._side(node, own, i)
        for name in results(self.graph, segment.block):
            root = "" if name == self.graph.loss else self.space.alias(name)
            wanted.setdefault(name, []).append(self._border(root))
        for name, readers in wanted.items():
            # A value that is handed on as it came has the same node at both ends.
            others = [reader for reader in readers if reader.node != made[name].node]
            if others:
                self.values.append(self._value(name, made[name], others, repeats))

    def _read(self, segment: LayoutSegment) -> dict[str, _Placed]:
        """What the block has from elsewhere."""
        block = segment.block
        stored = {
            name: _Placed(
                self.nodes[NodeKey("param", root)], self.moves.listed(self.space.params[root])
            )
            for name in block.params
            for root in (self.space.tied(name),)
        }
        return stored | {name: self._border(self.space.alias(name)) for name in block.inputs}

    def _border(self, root: str) -> _Placed:
        places = self.moves.listed(self.borders[root])
        return _Placed(self.nodes[NodeKey("border", root)], places)

    def _side(self, node: int, own: OpSpace, slot: int) -> _Placed:
        return _Placed(node, self.moves.combined(own.placements(slot), own.picks))

    def _value(
        self, name: str, made: _Placed, readers: Sequence[_Placed], repeats: int
    ) -> UnpricedEdge:
        sources, rows = _distinct(made.places)
        targets, columns = _distinct(np.concatenate([reader.places for reader in readers]))
        ends = np.cumsum([len(reader.places) for reader in readers])[:-1]
        found = tuple(
            Reader(reader.node, wants)
            for reader, wants in zip(readers, np.split(columns, ends), strict=True)
        )
        table = self.moves.table(self.graph.tensors[name].shape, sources, targets)
        return UnpricedEdge(name, made.node, rows, found, table, repeats)


def _distinct(places: Places) -> tuple[Places, Ints]:
    """The places without repeats, and which of them each is."""
    base = int(places.max(initial=0)) + 1
    keys = places @ (base ** np.arange(places.shape[1] - 1, -1, -1))
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return places[first], which.reshape(-1)
