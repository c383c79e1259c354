"""Which devices a stage gets: orders of all devices, and DAPPLE's three ways to choose some."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.errors import PlanError
from meshwright.ir.precision import precision
from meshwright.planner.problem.problem import Problem


def device_orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Orders in which stages may take devices; nodes stay together.

    As they are; those with most memory first, as early stages hold most micro-batches (Whale);
    the fastest first, and last. One order where all devices are equal.
    """
    dtype = precision(problem.precision).products
    keys: tuple[Callable[[DeviceType], tuple[float, ...]], ...] = (
        lambda device: (-device.usable_bytes, -device.peak(dtype)),
        lambda device: (-device.peak(dtype), -device.usable_bytes),
        lambda device: (device.peak(dtype), -device.usable_bytes),
    )
    natural = tuple(range(problem.cluster.num_devices))
    found = [natural, *(_sorted(problem.cluster, key) for key in keys)]
    return tuple(dict.fromkeys(found))


def _sorted(cluster: Cluster, key: Callable[[DeviceType], tuple[float, ...]]) -> tuple[int, ...]:
    """Nodes by their best device, the devices of a node by themselves."""
    nodes = [
        sorted(machine.ranks, key=lambda rank: (key(cluster.device(rank)), rank))
        for machine in _machines(cluster)
    ]
    nodes.sort(key=lambda ranks: (key(cluster.device(ranks[0])), ranks))
    return tuple(rank for ranks in nodes for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Machine:
    """A node: its ranks, and those that are not used yet."""

    ranks: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def is_fresh(self) -> bool:
        return self.ranks == self.free


def placements(cluster: Cluster, used: Collection[int], count: int) -> tuple[tuple[int, ...], ...]:
    """At most three sets of `count` unused devices (DAPPLE, Fan et al. 2021, section 4.2).

    Fresh first takes machines that nobody uses; append first fills up those that are partly used;
    scatter first spreads over the machines in use, or over all if none is.
    """
    machines = [m for m in _machines(cluster, used) if m.free]
    free = sum(len(m.free) for m in machines)
    if not 1 <= count <= free:
        raise PlanError(f"{count} devices asked for; {free} of {cluster.name} are free, at least 1")
    fresh = [m for m in machines if m.is_fresh]
    begun = [m for m in machines if not m.is_fresh]
    taken = (
        _in_turn([*fresh, *begun]),
        _in_turn([*begun, *fresh]),
        [*_scattered(begun), *_scattered(fresh)],
    )
    return tuple(dict.fromkeys(tuple(sorted(ranks[:count])) for ranks in taken))


def _machines(cluster: Cluster, used: Collection[int] = ()) -> Iterator[_Machine]:
    start = 0
    for node in cluster.nodes:
        ranks = tuple(range(start, start + len(node.devices)))
        yield _Machine(ranks, tuple(rank for rank in ranks if rank not in used))
        start = ranks[-1] + 1


def _in_turn(machines: list[_Machine]) -> list[int]:
    return [rank for machine in machines for rank in machine.free]


def _scattered(machines: list[_Machine]) -> list[int]:
    """One device of each machine, then the second of each, and so on."""
    longest = max((len(m.free) for m in machines), default=0)
    return [m.free[i] for i in range(longest) for m in machines if i < len(m.free)]
