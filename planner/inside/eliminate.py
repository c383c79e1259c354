"""Makes a choice smaller without changing its optimum.

A link with one reader is an edge: a table over the states of two nodes. A node with one edge is
folded into its neighbour, one with two edges becomes an edge between its neighbours, as in partial
Boolean quadratic programming (Scholz and Eckstein 2002). So chains of views and pointwise ops
vanish, and what is left to the solver are the places where values fork and join.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inside.choices import BlockProblem, Reader, ValueEdge

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Reduced:
    """What is left, and how to get back."""

    costs: dict[int, Ints]
    """Per node that is left."""
    edges: dict[int, dict[int, Ints]]
    """Node -> neighbour -> table over the states of both; held both ways."""
    links: list[ValueEdge]
    """With several readers."""
    folded: list[tuple[int, dict[int, Ints], Ints]] = field(default_factory=list)
    """Nodes that were taken out: with their tables to the neighbours of then, and costs."""
    offset: int = 0
    """Cost of what was taken out on its own."""
    kept: dict[int, Ints] = field(default_factory=dict)
    """Per node: which of its own states are left."""

    def states(self, left: dict[int, int]) -> tuple[int, ...]:
        """States of all nodes, given those of what is left."""
        found = dict(left)
        for node, tables, costs in reversed(self.folded):
            total = costs.copy()
            for neighbour, table in tables.items():
                total += table[:, found[neighbour]]
            found[node] = int(np.argmin(total))
        return tuple(int(self.kept[n][found[n]]) for n in sorted(found))


def reduce(choices: BlockProblem, largest: int = 4_000_000) -> Reduced:
    """Takes out what can be taken out; no table gets more than `largest` entries."""
    costs = {n: own.copy() for n, own in enumerate(choices.costs)}
    found = Reduced(costs, {n: {} for n in costs}, [])
    found.kept = {n: np.arange(len(own), dtype=np.int64) for n, own in costs.items()}
    _merge_equal(found, choices)
    for link in _on_kept(found, choices):
        _add_link(found, link)
    queue = sorted(found.costs)
    while queue:
        node = queue.pop(0)
        if node in found.costs:
            queue.extend(n for n in _take_out(found, node, largest) if n not in queue)
    return found


def _merge_equal(found: Reduced, choices: BlockProblem) -> None:
    """Of states that look alike to all neighbours the cheapest stays."""
    looks: dict[int, list[Ints]] = {n: [] for n in found.costs}
    for link in choices.links:
        looks[link.source].append(link.made)
        for reader in link.readers:
            looks[reader.node].append(reader.wants)
    for node, columns in looks.items():
        costs = found.costs[node]
        order = np.lexsort((costs, *columns))
        first = np.ones(len(order), np.bool_)
        changed = np.zeros(max(len(order) - 1, 0), np.bool_)
        for column in columns:
            changed |= column[order][1:] != column[order][:-1]
        first[1:] = changed
        found.kept[node] = np.sort(order[first])
        found.costs[node] = costs[found.kept[node]]


def _on_kept(found: Reduced, choices: BlockProblem) -> list[ValueEdge]:
    """The links over the states that are left."""
    return [
        ValueEdge(
            link.source,
            link.made[found.kept[link.source]],
            tuple(Reader(r.node, r.wants[found.kept[r.node]]) for r in link.readers),
            link.price,
        )
        for link in choices.links
    ]


def _add_link(found: Reduced, link: ValueEdge) -> None:
    """As costs or edges where it is that simple."""
    fixed = [r for r in link.readers if (r.wants == r.wants[0]).all()]
    price = link.price.copy()
    for column in sorted({int(r.wants[0]) for r in fixed}):
        found.costs[link.source] += price[link.made, column]
        price[:, column] = 0
    readers = [r for r in link.readers if not any(r is f for f in fixed)]
    nodes = dict.fromkeys(r.node for r in readers)
    if not nodes:
        return
    if len(nodes) == 1:
        node = next(iter(nodes))
        _add_edge(found, link.source, node, _table(price[link.made], [r.wants for r in readers]))
    elif len(nodes) == 2 and (link.made == link.made[0]).all():
        _add_pair(found, price[link.made[0]], readers)
    else:
        found.links.append(ValueEdge(link.source, link.made, tuple(readers), price))


def _table(rows: Ints, wants: Sequence[Ints]) -> Ints:
    """What each state of the reader costs, given each state of the source."""
    total = rows[:, wants[0]].copy()
    for i, column in enumerate(wants[1:], 1):
        fresh = np.ones(len(column), np.bool_)
        for other in wants[:i]:
            fresh &= column != other
        total += np.where(fresh[None, :], rows[:, column], 0)
    return total


def _add_pair(found: Reduced, row: Ints, readers: Sequence[Reader]) -> None:
    """Two nodes that read a value which lies in one place."""
    a, b = dict.fromkeys(r.node for r in readers)
    total = np.zeros((len(found.costs[a]), len(found.costs[b])), np.int64)
    seen: list[Ints] = []
    for reader in readers:
        wants = reader.wants[:, None] if reader.node == a else reader.wants[None, :]
        wants = np.broadcast_to(wants, total.shape)
        fresh = np.ones(total.shape, np.bool_)
        for other in seen:
            fresh &= wants != other
        total += np.where(fresh, row[wants], 0)
        seen.append(wants)
    _add_edge(found, a, b, total)


def _add_edge(found: Reduced, a: int, b: int, table: Ints) -> None:
    known = found.edges[a].get(b)
    total = table if known is None else known + table
    found.edges[a][b], found.edges[b][a] = total, total.T


def _take_out(found: Reduced, node: int, largest: int) -> list[int]:
    """Folds a node into what is beside it, if it is that simple; the neighbours."""
    tables, costs = found.edges[node], found.costs[node]
    others = sorted(tables)
    if len(others) > 2 or any(_touches(link, node) for link in found.links):
        return []
    if len(others) == 2:
        a, b = others
        if len(found.costs[a]) * len(found.costs[b]) > largest:
            return []
        _add_edge(found, a, b, _through(tables[a], costs, tables[b]))
    elif others:
        found.costs[others[0]] = found.costs[others[0]] + (tables[others[0]] + costs[:, None]).min(
            0
        )
    else:
        found.offset += int(costs.min())
    found.folded.append((node, dict(tables), costs))
    for other in others:
        del found.edges[other][node]
    del found.costs[node], found.edges[node]
    return others


def _through(left: Ints, costs: Ints, right: Ints) -> Ints:
    """Cheapest way from a state of one neighbour through the node to one of the other."""
    first = left + costs[:, None]
    return np.stack([(first[:, i, None] + right).min(0) for i in range(first.shape[1])])


def _touches(link: ValueEdge, node: int) -> bool:
    return link.source == node or any(r.node == node for r in link.readers)


def restricted(found: Reduced, alive: Mapping[int, NDArray[np.bool_]]) -> BlockProblem:
    """What is left, with the states that are alive only; nodes are numbered anew, in order."""
    number = {n: i for i, n in enumerate(sorted(found.costs))}
    edges = [
        _plain_link(number[a], number[b], table[np.ix_(alive[a], alive[b])])
        for a, near in sorted(found.edges.items())
        for b, table in sorted(near.items())
        if a < b
    ]
    links = [
        ValueEdge(
            number[link.source],
            link.made[alive[link.source]],
            tuple(Reader(number[r.node], r.wants[alive[r.node]]) for r in link.readers),
            link.price,
        )
        for link in found.links
    ]
    return BlockProblem(tuple(found.costs[n][alive[n]] for n in number), (*edges, *links))


def _plain_link(a: int, b: int, table: Ints) -> ValueEdge:
    """An edge as a link with one reader."""
    rows, columns = (np.arange(n, dtype=np.int64) for n in table.shape)
    return ValueEdge(a, rows, (Reader(b, columns),), table)
