"""How many samples each replica gets where replicas differ, as Whale does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor


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
