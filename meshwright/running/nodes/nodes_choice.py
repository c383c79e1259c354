"""Which of several machines this one is, and where they meet: `--rdzv`, `--nodes` and `--node`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.running.nodes.meeting import MeetingPlace, parse_places

_RANGE = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class NodesChoice:
    """What was asked for."""

    places: Sequence[MeetingPlace]
    least: int = 0
    """Nodes, without which the job waits; 0: more than half of the cluster's."""
    most: int = 0
    """Nodes of the cluster, if it was said."""
    node: int = -1
    """Number of this one; -1 for any that is free."""

    @classmethod
    def parse(cls, rdzv: str, nodes: str | None, node: int | None) -> Self:
        """PlanError names what is wrong with the texts."""
        places = parse_places(rdzv)
        match = _RANGE.fullmatch(nodes or "0")
        if match is None or (nodes is not None and int(match[1]) < 1):
            raise PlanError(f"--nodes {nodes!r} is not MIN:MAX, such as 3:4")
        least, most = int(match[1]), int(match[2] or 0)
        return cls(places, least, most, -1 if node is None else node)

    def check(self, cluster: Cluster) -> None:
        """PlanError if it cannot be of this cluster."""
        count = cluster.num_nodes
        if count < 2:
            raise PlanError(
                f"--rdzv is for several nodes, and {cluster.name} has one: leave it out"
            )
        if self.most not in (0, count) or self.least > count:
            raise PlanError(
                f"--nodes: MAX is the {count} nodes of {cluster.name}, and MIN no more; nearest is "
                f"{min(self.least, count) or self.least_of(count)}:{count}"
            )
        if self.node >= count:
            raise PlanError(
                f"--node {self.node}: {cluster.name} has nodes 0 to {count - 1}; nearest is "
                f"{count - 1}"
            )

    def least_of(self, count: int) -> int:
        """Nodes of so many, without which the job waits: more than half, unless it was said. Of
        parts that cannot reach each other one goes on, whatever it is (`lease.py`)."""
        return self.least or count // 2 + 1
