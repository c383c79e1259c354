"""How many samples each replica gets where replicas differ: whole ones, at least one each."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Replica:
    """What a replica takes for 1, 2, ... samples, and how many its memory holds."""

    seconds: tuple[float, ...]
    most: int


def exact_shares(samples: int, replicas: Sequence[Replica]) -> tuple[int, ...] | None:
    """Shares whose slowest replica is as fast as can be; None if memory does not hold the samples.

    minimise max_i seconds_i[n_i]   with   sum n_i = samples,   1 <= n_i <= most_i

    Each sample goes where it ends first. That is exact, as times do not fall with more samples:
    where they would, the longest of those before counts.
    """
    limits = [min(r.most, len(r.seconds), samples) for r in replicas]
    if min(limits) < 1 or sum(limits) < samples or len(replicas) > samples:
        return None
    times = [list(accumulate(r.seconds, max)) for r in replicas]
    shares = [1] * len(replicas)
    ends = [(times[i][1], 2, i) for i, limit in enumerate(limits) if limit > 1]
    heapify(ends)
    for _ in range(samples - len(replicas)):
        _, count, i = ends[0]
        shares[i] = count
        if count < limits[i]:
            heapreplace(ends, (times[i][count], count + 1, i))
        else:
            heappop(ends)
    return tuple(shares)
