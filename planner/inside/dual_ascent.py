"""A bound of a choice, and with it which states can be in no better choice, by dual ascent.

Costs are moved between nodes and edges so that the sum of the smallest entries of all, which no
choice can undercut, grows: each node in turn takes what its edges to earlier nodes can spare, and
gives what it has to its edges to later ones; then the same backwards (sequential reweighted message
passing, Kolmogorov 2015). A link is one edge per reader; the price that its readers share is moved
from readers that have it to spare to all of them.

A state whose smallest total is above the best known choice is dropped. Often all but the optimum
go; otherwise the integer program gets what is left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inside.choice_ilp import UNIT
from meshwright.planner.inside.choices import ValueEdge
from meshwright.planner.inside.eliminate import Reduced

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Side:
    """One end of an edge: the row or column that each state of the node takes."""

    node: int
    of_state: Ints
    message: Floats
    """Per row: what the edge gave to the node; negative, what it got."""
    order: Ints
    starts: Ints
    used: Ints | slice
    """Rows that some state takes, for `smallest`; most often all."""

    @classmethod
    def of(cls, node: int, of_state: Ints, size: int) -> "_Side":
        order = np.argsort(of_state, kind="stable")
        used, starts = np.unique(of_state[order], return_index=True)
        rows = slice(None) if len(used) == size else used
        return cls(node, of_state, np.zeros(size), order, starts, rows)

    def smallest(self, values: Floats) -> Floats:
        """Per row that is used: the least of its states' values."""
        return np.asarray(np.minimum.reduceat(values[self.order], self.starts))


@dataclass(slots=True)
class _Edge:
    """All of its rows are used; those who share a link's price may use few of its columns."""

    rows: _Side
    columns: _Side
    cost: Floats

    def rest(self) -> Floats:
        """Entries that can occur, with what was given away taken off."""
        columns = self.columns
        left = self.cost[:, columns.used] - self.rows.message[:, None]
        left -= columns.message[columns.used]
        return left

    def sides(self, node: int) -> tuple[_Side, _Side]:
        """The node's own side first."""
        return (self.rows, self.columns) if self.rows.node == node else (self.columns, self.rows)

    def take(self, own: _Side) -> None:
        """All that the edge can spare goes to the node of that side."""
        own.message[own.used] += np.minimum.reduce(self.rest(), 0 if own is self.columns else 1)

    def slack(self, node: int) -> Floats:
        """Per state of the node: how far its best entry is above the least of all."""
        at = 0 if self.rows.node == node else 1
        own, _ = self.sides(node)
        rest = self.rest()
        found = np.zeros(len(own.message))
        found[own.used] = rest.min(1 - at) - rest.min()
        return np.asarray(found[own.of_state])


_Visit = tuple[int, list[tuple[_Edge, _Side]], list[_Side]]


@dataclass(slots=True)
class Ascent:
    """The state of an ascent."""

    costs: dict[int, Floats]
    edges: list[_Edge]
    shared: list[list[_Edge]]
    """The edges of each link."""
    near: dict[int, list[_Edge]]
    own: dict[int, list[_Side]]
    """The ends of these that are the node's."""

    @classmethod
    def of(cls, reduced: Reduced) -> "Ascent":
        costs = {n: own / UNIT for n, own in sorted(reduced.costs.items())}
        edges = list(_pairs(reduced))
        shared = [list(_of_link(link)) for link in reduced.links]
        edges += [edge for group in shared for edge in group]
        near: dict[int, list[_Edge]] = {n: [] for n in costs}
        for edge in edges:
            near[edge.rows.node].append(edge)
            near[edge.columns.node].append(edge)
        own = {n: [edge.sides(n)[0] for edge in found] for n, found in near.items()}
        return cls(costs, edges, shared, near, own)

    def now(self, node: int) -> Floats:
        """The node's costs with what its edges gave."""
        total = self.costs[node].copy()
        for side in self.own[node]:
            total += side.message[side.of_state]
        return total

    def bound(self) -> float:
        nodes = sum([float(self.now(n).min()) for n in self.costs])
        return nodes + sum([float(edge.rest().min()) for edge in self.edges])

    def slacks(self) -> dict[int, Floats]:
        """Per node and state: by how much more than the bound any choice with it costs."""
        found = {}
        for node in self.costs:
            own = self.now(node)
            found[node] = own - own.min()
            for edge in self.near[node]:
                found[node] += edge.slack(node)
        return found

    def _course(self, nodes: Sequence[int]) -> list[_Visit]:
        """Nodes in an order: of each its edges to those before it, and its ends of the others."""
        rank = {n: i for i, n in enumerate(nodes)}
        found: list[_Visit] = []
        for node in nodes:
            sides = [(edge, *edge.sides(node)) for edge in self.near[node]]
            before = [(e, own) for e, own, other in sides if rank[other.node] <= rank[node]]
            after = [own for _, own, other in sides if rank[other.node] > rank[node]]
            found.append((node, before, after))
        return found

    def _sweep(self, course: Sequence[_Visit]) -> None:
        """Once through all nodes."""
        for node, earlier, later in course:
            for edge, own in earlier:
                edge.take(own)
            if later:
                part = self.now(node) / max(len(later), len(earlier))
                for own in later:
                    own.message[own.used] -= own.smallest(part)

    def share_out(self) -> None:
        """What a reader can spare of a link's price goes to all that read it."""
        for group in self.shared:
            spare = []
            for edge in group:
                rest = edge.rest()
                own = edge.cost.copy()
                used = edge.columns.used
                own[:, used] = np.minimum(own[:, used], rest - rest.min())
                spare.append(own)
            wanted = np.zeros(group[0].cost.shape[1])
            for edge in group:
                wanted[edge.columns.used] += 1
            pool = sum(spare, np.zeros_like(group[0].cost)) / np.maximum(wanted, 1)
            for edge, own in zip(group, spare, strict=True):
                edge.cost = edge.cost - own
                edge.cost[:, edge.columns.used] += pool[:, edge.columns.used]

    def climb(self, rounds: int = 60, still: float = 1e-7) -> float:
        """Until the bound no longer grows; the bound."""
        nodes, known = sorted(self.costs), -np.inf
        there, back = self._course(nodes), self._course(nodes[::-1])
        for _ in range(rounds):
            self._sweep(there)
            self._sweep(back)
            self.share_out()
            now = self.bound()
            if now - known <= still * abs(now):
                return max(now, known)
            known = now
        return known

    def decode(self, nodes: Sequence[int]) -> dict[int, int]:
        """A choice: node by node what costs least beside those before it."""
        found: dict[int, int] = {}
        for node in nodes:
            total = self.costs[node].copy()
            for edge in self.near[node]:
                own, other = edge.sides(node)
                if other.node not in found:
                    total += own.message[own.of_state]
                else:
                    at = other.of_state[found[other.node]]
                    line = edge.cost[at] if own is edge.columns else edge.cost[:, at]
                    total += line[own.of_state]
            found[node] = int(np.argmin(total))
        return found


def _pairs(reduced: Reduced) -> Iterator[_Edge]:
    for a in sorted(reduced.edges):
        for b, table in sorted(reduced.edges[a].items()):
            if a < b:
                left, rows = np.unique(table, axis=0, return_inverse=True)
                both, columns = np.unique(left, axis=1, return_inverse=True)
                yield _Edge(
                    _Side.of(a, rows.reshape(-1), both.shape[0]),
                    _Side.of(b, columns.reshape(-1), both.shape[1]),
                    both / UNIT,
                )


def _of_link(link: ValueEdge) -> Iterator[_Edge]:
    made, rows = np.unique(link.made, return_inverse=True)
    targets = np.unique(np.concatenate([r.wants for r in link.readers]))
    price = link.price[np.ix_(made, targets)] / UNIT
    readers = np.zeros(len(targets))
    for reader in link.readers:
        readers[np.searchsorted(targets, np.unique(reader.wants))] += 1
    for reader in link.readers:
        columns = np.searchsorted(targets, reader.wants)
        cost = np.zeros_like(price)
        cost[:, columns] = price[:, columns] / readers[columns]
        yield _Edge(
            _Side.of(link.source, rows.reshape(-1), len(made)),
            _Side.of(reader.node, columns, len(targets)),
            cost,
        )
