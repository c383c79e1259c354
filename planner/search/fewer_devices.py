"""Fewer devices than there are, where these cannot be shared out: 2,047 nodes less 127 are faster.

Groups of pipeline ranks and replicas are equal, so that a number of devices with few divisors, as
is left when a node has failed, leaves a search little to choose from. Each `SmallerUse` says how
many whole nodes divide well, and by which frame.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.remaining import without
from meshwright.planner.across.model_space import divisors
from meshwright.planner.bounds.frames import UNITS

LEAST = 0.75
"""Of the devices, which a smaller use has at least."""
_CHUNKS = 2
"""Stages of a pipeline rank, as interleaved schedules have them: what is waited is so much less."""


@dataclass(frozen=True, slots=True)
class SmallerUse:
    """A part of a cluster that can be shared out evenly."""

    cluster: Cluster
    resting: tuple[int, ...]
    """Ranks of the whole cluster that are not used."""
    pins: tuple[str, ...]
    """The frame by which it was found; a search of that alone is quick."""
    share: float
    """Of what all devices could do, about what these do: 1 is the most."""


def smaller_uses(
    cluster: Cluster, *, batch: int, num_blocks: int, model_size: int, most: int
) -> tuple[SmallerUse, ...]:
    """The most promising ones, the best first, `most` at most; none for clusters of 16 nodes or
    fewer, whose devices a search shares out unevenly, or that are used best as a whole.

    `model_size`: ranks of one replica on one pipeline rank. What a stage holds is not looked at.
    """
    kinds = [node.devices for node in cluster.nodes]
    devices = max(kinds, key=kinds.count)
    kept = [number for number, node in enumerate(kinds) if node == devices]
    if cluster.num_nodes <= UNITS or len(set(devices)) > 1:
        return ()
    found: dict[int, tuple[float, tuple[str, ...]]] = {}
    total = cluster.num_devices
    for ranks, count, used in _frames(len(kept) * len(devices), batch, num_blocks, model_size):
        nodes, rest = divmod(used, len(devices))
        if rest or used < LEAST * total:
            continue
        share = used / total * _share(ranks, count, num_blocks)
        found[nodes] = max(
            found.get(nodes, (0.0, ())), (share, (f"pp={ranks}", f"num_microbatches={count}"))
        )
    whole, _ = found.pop(cluster.num_nodes, (0.0, ()))
    better = [(nodes, *rest) for nodes, rest in found.items() if rest[0] > whole]
    ordered = sorted(better, key=lambda item: (-item[1], -item[0]))
    return tuple(_use(cluster, kept[:nodes], pins, share) for nodes, share, pins in ordered[:most])


def _frames(
    most: int, batch: int, num_blocks: int, model_size: int
) -> Iterator[tuple[int, int, int]]:
    """(pipeline ranks, micro-batches, devices) where every replica has as many samples."""
    for count in divisors(batch):
        for replicas in divisors(batch // count):
            for ranks in range(1, min(num_blocks, most // (replicas * model_size)) + 1):
                yield ranks, count, ranks * replicas * model_size


def _share(ranks: int, count: int, num_blocks: int) -> float:
    """Of the time of a pipeline, what its ranks work: the longest has most blocks, and all wait
    while it fills and empties."""
    busy = _CHUNKS * count if ranks > 1 else count
    return num_blocks / (ranks * ceil(num_blocks / ranks)) * busy / (busy + ranks - 1)


def _use(cluster: Cluster, nodes: list[int], pins: tuple[str, ...], share: float) -> SmallerUse:
    ends, first = set(nodes), 0
    resting: list[int] = []
    for number, node in enumerate(cluster.nodes):
        if number not in ends:
            resting += range(first, first + len(node.devices))
        first += len(node.devices)
    return SmallerUse(without(cluster, resting), tuple(resting), pins, share)
