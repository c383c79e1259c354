"""Ranks that are slower than others with the same work: they throttle, or others use the machine.

All wait for the slowest, so a step's time does not show which it is. What a rank was busy with its
actions, without what it waited in them, does.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from meshwright.ir.plan.plan import Plan
from meshwright.runtime.world.standing import RankStanding

LOOK_S, LOOKS = 10.0, 6
"""From one look to the next, and how many have to agree."""
SLOW = 1.5
"""So many times as long as others in each of these looks, and a rank is slow."""
LEAST_S = 0.005
"""Steps in which ranks do less are all overhead and noise."""
_ROUND = 4
"""Parts of 1 to which a factor is rounded: as many plans are searched as there are factors."""

Standings = Callable[[], Mapping[int, RankStanding]]
"""Where ranks are, if one asks."""


@dataclass(eq=False)
class SlowRanks:
    """Looks at the ranks of one start."""

    plan: Plan
    _looked: float = field(default_factory=lambda: time.monotonic())
    _step: int = 0
    _seen: deque[dict[int, float]] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def changed(self, standings: Standings, known: Mapping[int, float]) -> dict[int, float]:
        """Rank -> how many times as long it takes as others with the same work, at least 1, where
        that is by far more or less than `known` (1 of those that are not in it) at each of the
        newest looks; nothing between two looks."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return {}
        self._looked, found = now, standings()
        step = min((one.step for one in found.values()), default=0)
        busy = {rank: one.busy_s for rank, one in found.items() if one.has_stepped}
        if step <= self._step or len(busy) < self.plan.world_size:
            return {}
        self._step = step
        self._seen.append(times_as_long(self.plan, busy))
        if len(self._seen) < LOOKS:
            return {}
        made = {}
        for rank in self._seen[-1]:
            factors = [look.get(rank, 1.0) for look in self._seen]
            before = known.get(rank, 1.0)
            if min(factors) >= SLOW * before or max(factors) * SLOW <= before:
                made[rank] = max(1.0, round(median(factors) * _ROUND) / _ROUND)
        if made:
            self._seen.clear()
        return made


def times_as_long(plan: Plan, busy: Mapping[int, float]) -> dict[int, float]:
    """Rank -> its seconds for a sample over those of the usual rank with the same stages, if it
    shares them with any."""
    samples: dict[int, dict[int, int]] = {}
    for number, stage in enumerate(plan.stages):
        for rank in stage.devices:
            share = stage.batch_shares[stage.coordinates(rank)["dp"]]
            samples.setdefault(rank, {})[number] = share
    groups: dict[tuple[int, ...], dict[int, float]] = {}
    for rank, shares in samples.items():
        if sum(shares.values()):
            group = groups.setdefault(tuple(shares), {})
            group[rank] = busy[rank] / sum(shares.values())
    found: dict[int, float] = {}
    for group in groups.values():
        usual_s = median_low(group.values())
        if len(group) > 1 and max(busy[rank] for rank in group) >= LEAST_S and usual_s > 0:
            found |= {rank: each_s / usual_s for rank, each_s in group.items()}
    return found
