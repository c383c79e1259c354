"""A mesh's space with prices: the choice of a state for every op, parameter and border."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph import Graph
from meshwright.ir.layout import R, Strategy
from meshwright.planner.axis_layout import PICOSECONDS
from meshwright.planner.choices import Choices, Link, Reader
from meshwright.planner.data_layout import results
from meshwright.planner.mesh_costs import Pricer, op_seconds, stored_seconds
from meshwright.planner.mesh_space import MeshSpace, Place, table
from meshwright.planner.moves import Moves
from meshwright.planner.prices import Regime
from meshwright.planner.segments import Segment

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class NodeKey(NamedTuple):
    """Who chooses."""

    kind: str
    """`op`, `param` or `border`."""
    name: str


@dataclass(frozen=True, slots=True)
class MeshProblem:
    """The choices, and whose they are."""

    space: MeshSpace
    nodes: dict[NodeKey, int]
    choices: Choices

    def strategy(self, states: Sequence[int], op: str) -> tuple[Strategy, ...]:
        """Per axis."""
        return self.space.ops[op].strategy(states[self.nodes[NodeKey("op", op)]])

    def stored(self, states: Sequence[int], name: str) -> Place:
        return self.space.params[name][states[self.nodes[NodeKey("param", name)]]]

    def border(self, states: Sequence[int], root: str) -> Place:
        return self.space.borders[root][states[self.nodes[NodeKey("border", root)]]]


class _Placed(NamedTuple):
    """Where a value lies, or is wanted, in each state of a node."""

    node: int
    places: Sequence[Place]


@dataclass(slots=True)
class _Maker:
    """Value by value, a link in the making."""

    graph: Graph
    space: MeshSpace
    pricer: Pricer
    borders: Mapping[str, tuple[Place, ...]]
    nodes: dict[NodeKey, int] = field(default_factory=dict)
    costs: list[Ints] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def add(self, kind: str, name: str, seconds: Floats) -> int:
        node = self.nodes[NodeKey(kind, name)] = len(self.costs)
        self.costs.append(np.round(seconds * PICOSECONDS).astype(np.int64))
        return node

    def segment(self, segment: Segment, repeats: int) -> None:
        """The ops of a block, and the links between them and what it reads and hands on."""
        made, wanted = self._read(segment), dict[str, list[_Placed]]()
        for op in segment.ops:
            own = self.space.ops[op.name]
            seconds = op_seconds(self.graph, own, self.space, self.pricer.regime)
            node = self.add("op", op.name, seconds * repeats)
            for i, name in enumerate(op.inputs):
                wanted.setdefault(name, []).append(_Placed(node, own.sides(i)))
            for i, name in enumerate(op.outputs, len(op.inputs)):
                if name:
                    made[name] = _Placed(node, own.sides(i))
        for name in results(self.graph, segment.block):
            root = "" if name == self.graph.loss else self.space.alias(name)
            wanted.setdefault(name, []).append(self._border(root))
        for name, readers in wanted.items():
            # A value that is handed on as it came has the same node at both ends.
            others = [reader for reader in readers if reader.node != made[name].node]
            if others:
                self._link(name, made[name], others, repeats)

    def _read(self, segment: Segment) -> dict[str, _Placed]:
        """What the block has from elsewhere."""
        block = segment.block
        stored = {
            name: _Placed(self.nodes[NodeKey("param", name)], self.space.params[name])
            for name in block.params
        }
        return stored | {name: self._border(self.space.alias(name)) for name in block.inputs}

    def _border(self, root: str) -> _Placed:
        """The loss, whose name here is empty, is whole."""
        places = self.borders[root] if root else ((R,) * len(self.space.mesh),)
        return _Placed(self.nodes[NodeKey("border", root)], places)

    def _link(
        self,
        name: str,
        made: _Placed,
        readers: Sequence[_Placed],
        repeats: int,
    ) -> None:
        sources, rows = table(made.places)
        every, columns = table([place for reader in readers for place in reader.places])
        ends = np.cumsum([len(reader.places) for reader in readers])[:-1]
        found = [
            Reader(reader.node, wants)
            for reader, wants in zip(readers, np.split(columns, ends), strict=True)
        ]
        price = self.pricer.seconds(name, sources, every) * repeats
        self.links.append(
            Link(made.node, rows, tuple(found), np.round(price * PICOSECONDS).astype(np.int64))
        )


def mesh_problem(
    graph: Graph, space: MeshSpace, regime: Regime, moves: Moves, split_borders: bool
) -> MeshProblem:
    """The choices on a mesh at some prices."""
    whole = (R,) * len(space.mesh)
    borders = {n: p if split_borders else (whole,) for n, p in space.borders.items()}
    maker = _Maker(graph, space, Pricer(graph, space.mesh, regime, moves), borders)
    copies = dict(_copies(graph, space))
    for name, places in space.params.items():
        maker.add("param", name, stored_seconds(graph, space, regime, name, places) * copies[name])
    for root, places in borders.items():
        maker.add("border", root, np.zeros(len(places)))
    maker.add("border", "", np.zeros(1))
    repeats = Counter(block.pattern for block in graph.blocks)
    for segment in space.segments:
        maker.segment(segment, repeats[segment.block.pattern])
    chosen = MeshSpace(space.mesh, space.segments, space.ops, space.params, borders, space.alias)
    return MeshProblem(chosen, maker.nodes, Choices(tuple(maker.costs), tuple(maker.links)))


def _copies(graph: Graph, space: MeshSpace) -> Iterator[tuple[str, int]]:
    """How many different tensors stand where the first block of a pattern has this one."""
    for segment in space.segments:
        same = [b.params for b in graph.blocks if b.pattern == segment.block.pattern]
        for i, name in enumerate(segment.block.params):
            yield name, len({params[i] for params in same})
