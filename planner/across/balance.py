"""How many samples each replica gets where replicas differ: exactly, and as Whale does it.

Both work in whole samples, give every replica at least one, and keep each device's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from math import floor


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


@dataclass(frozen=True, slots=True)
class ReplicaDevice:
    """What Whale knows of the device of a replica."""

    flops: float
    memory_bytes: float
    fixed_bytes: float
    """Needed whatever the share."""
    sample_bytes: float
    """Needed per sample."""

    def used(self, samples: int) -> float:
        """Share of its memory that so many samples need; above 1 is too much."""
        return (self.fixed_bytes + samples * self.sample_bytes) / self.memory_bytes

    @property
    def most(self) -> float:
        """Samples that it holds."""
        room = self.memory_bytes - self.fixed_bytes
        if not self.sample_bytes:
            return float("inf") if room >= 0 else 0.0
        return max(0, floor(room / self.sample_bytes))


def whale_shares(samples: int, devices: Sequence[ReplicaDevice]) -> tuple[int, ...] | None:
    """Algorithm 1 of Whale (Jia et al. 2022): shares by peak FLOP/s, then moved out of memory.

    While a device needs more memory than it has and another is free, the fullest one gives what it
    holds too much to the least busy one, as much as that can take. None if it does not end well.
    """
    if len(devices) > samples:
        return None
    shares = _in_proportion(samples, [device.flops for device in devices])
    total = sum(device.flops for device in devices)
    over = {i for i, device in enumerate(devices) if shares[i] > device.most}
    free = {i for i, device in enumerate(devices) if shares[i] < device.most} - over
    while over and free:
        peak = max(sorted(over), key=lambda i: devices[i].used(shares[i]))
        valley = min(
            sorted(free),
            key=lambda i: (shares[i] * total / devices[i].flops, devices[i].used(shares[i])),
        )
        excess = shares[peak] - max(1, int(devices[peak].most))
        moved = int(min(excess, devices[valley].most - shares[valley]))
        if moved <= 0:
            free.remove(valley)
            continue
        shares[peak] -= moved
        shares[valley] += moved
        if shares[peak] <= devices[peak].most:
            over.remove(peak)
    return None if over else tuple(shares)


def _in_proportion(samples: int, weights: Sequence[float]) -> list[int]:
    """Whole shares near the weights', at least one each: by largest remainders."""
    total = sum(weights)
    exact = [samples * weight / total for weight in weights]
    shares = [max(1, floor(share)) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: max(0, samples - sum(shares))]:
        shares[i] += 1
    while sum(shares) > samples:
        largest = max(range(len(shares)), key=lambda i: (shares[i], -i))
        shares[largest] -= 1
    return shares
