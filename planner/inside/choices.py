"""The choice that a layout is: one state per node, so that nodes and the moves between them are
cheapest together.

    minimise   sum over nodes n   cost[n, state(n)]
             + sum over links v   sum over t in wanted(v)   price[v, made(v), t]

wanted(v) being the placements in which its readers want it.

A node is an op (its states are strategies) or something stored or handed on (its states are
placements). A link is a value: one node makes it, others read it, and each placement that is wanted
of it is paid for once, however many want it. Costs are whole picoseconds, so that ties do not
depend on rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reader:
    """A node that reads a link, and the column of its price that each state of the node wants."""

    node: int
    wants: Ints


@dataclass(frozen=True, slots=True)
class ValueEdge:
    """A value between nodes; its source does not read it."""

    source: int
    made: Ints
    """The row of the price that each state of the source makes."""
    readers: tuple[Reader, ...]
    price: Ints
    """Made x wanted."""


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """What to choose."""

    costs: tuple[Ints, ...]
    """Per node, of each state."""
    links: tuple[ValueEdge, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A state per node."""

    states: tuple[int, ...]
    cost: int
    bound: int
    """No choice is cheaper."""


def cost_of(choices: BlockProblem, states: Sequence[int]) -> int:
    """What a choice costs."""
    own = sum(int(costs[s]) for costs, s in zip(choices.costs, states, strict=True))
    return own + sum(link_cost(link, states) for link in choices.links)


def link_cost(link: ValueEdge, states: Sequence[int]) -> int:
    """Each wanted placement once."""
    row = link.price[link.made[states[link.source]]]
    wanted = {int(reader.wants[states[reader.node]]) for reader in link.readers}
    return int(sum(int(row[column]) for column in wanted))
