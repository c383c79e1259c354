"""Where groups of devices lie: the order in which stages take devices, and the tiers of groups."""

from functools import cached_property

from meshwright.ir.cluster.device import Link
from meshwright.planner.across.device_order import device_orders
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import Mesh

SCATTERED = 64
"""Devices up to which stages may also be spread over nodes."""

Order = tuple[int, ...]


def orders(problem: Problem) -> tuple[Order, ...]:
    """Orders in which stages take devices: as they are, by their type, and spread over nodes."""
    found = dict.fromkeys(device_orders(problem))
    if 1 < problem.cluster.num_nodes and problem.cluster.num_devices <= SCATTERED:
        found[scattered(problem)] = None
    return tuple(found)


def scattered(problem: Problem) -> Order:
    """One device of each node, then the second of each, and so on (DAPPLE's scatter first)."""
    nodes: dict[int, list[int]] = {}
    for rank in range(problem.cluster.num_devices):
        nodes.setdefault(problem.cluster.node_of(rank), []).append(rank)
    longest = max(map(len, nodes.values()))
    return tuple(held[i] for i in range(longest) for held in nodes.values() if i < len(held))


class Places:
    """The devices in one order; groups are runs of it."""

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem, self.order = problem, order
        self._ways: dict[Link, int] = {}
        self._links: dict[int, Link | None] = {}
        """From the group before a place."""
        self.natural = order == tuple(range(len(order)))

    @cached_property
    def period(self) -> int:
        """Groups that begin so many devices apart are alike; 0 if none are."""
        cluster = self.problem.cluster
        alike = len(set(cluster.nodes)) == 1 and len(set(cluster.nodes[0].devices)) == 1
        return len(cluster.nodes[0].devices) if alike and self.natural else 0

    def like(self, start: int, size: int) -> int:
        """The first start of a group that is like this one."""
        if not self.period:
            return start
        # A group inside a node is like any other of its size inside one.
        offset = start % self.period
        return 0 if offset + size <= self.period else offset

    def ranks(self, start: int, size: int, mesh: Mesh | None = None) -> Order:
        """The devices of a group, in the order of its mesh."""
        found = self.order[start : start + size]
        return mesh.placed(found) if mesh else found

    def room_bytes(self, start: int, size: int) -> float:
        if self.period:
            return self._room_bytes
        return float(self.problem.room_bytes(self.order[start : start + size]))

    @cached_property
    def _room_bytes(self) -> float:
        """Of all devices alike."""
        return float(self.problem.room_bytes(self.order[:1]))

    def link(self, start: int, size: int) -> Link | None:
        """To the group behind."""
        end = start + size
        if end not in self._links:
            inside = end < len(self.order)
            ranks = self.order[end - 1 : end + 1]
            self._links[end] = self.problem.cluster.link(*ranks) if inside else None
        return self._links[end]

    def way(self, start: int, size: int) -> int:
        """A number of the tier that leads to the group behind; 0 at the end."""
        link = self.link(start, size)
        return 0 if link is None else 1 + self._ways.setdefault(link, len(self._ways))

    def types(self, start: int, size: int) -> tuple[str, ...]:
        """Device types of a group."""
        names = self.problem.tables.device_names
        if self.period:
            return (names[0],)
        return tuple(sorted({names[rank] for rank in self.order[start : start + size]}))
