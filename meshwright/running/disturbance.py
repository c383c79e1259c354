"""Whether others used the machine's cores while something was measured, or slowed it unseen.

Who shares a host with a virtual machine shares caches, memory and often cores with it: the machine
is then slower although no process on it says why.
"""

import resource
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import psutil
import torch
import torch.distributed as dist
from torch import nn

from meshwright.testing.spawn import run_ranks

LOOK_S, WARM = 0.6, 3
"""How long a look at the pace takes, after so many steps."""
GLANCE = 3
"""Steps of a short look, between two steps of training."""
ROWS, WIDTH = 400, 384


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the clocks stood."""

    at_s: float
    busy_s: float
    """Of all cores, whoever used them."""
    own_s: float
    """Of this process and its children that have ended."""


class FixedWork:
    """A step of a small network, always the same: what it takes says how fast the machine is."""

    def __init__(self) -> None:
        self._network = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self._batch = torch.ones(ROWS, WIDTH)
        for _ in range(WARM):
            self.step_s()

    def step_s(self) -> float:
        start = perf_counter()
        self._network.zero_grad(set_to_none=True)
        self._network(self._batch).square().mean().backward()
        return perf_counter() - start

    def glance_s(self) -> float:
        """The pace now; every rank of the process group has to ask. As many of them as there are
        cores work, the others wait."""
        dist.barrier()
        works = dist.get_rank() < (psutil.cpu_count() or 1)
        taken = torch.tensor(median(self.step_s() for _ in range(GLANCE)) if works else 0.0)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)


def pace_s() -> float:
    """Returns seconds of the fixed work, now, while every core has some."""
    return float(max(run_ranks(psutil.cpu_count() or 1, _pace_s)))


def _pace_s() -> float:
    """The median of those that fit into the look."""
    work, taken = FixedWork(), list[float]()
    dist.barrier()
    end = perf_counter() + LOOK_S
    while perf_counter() < end:
        taken.append(work.step_s())
    return median(taken)


def mark() -> Mark:
    """Returns where the clocks stand now."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(u.ru_utime + u.ru_stime for u in used)
    return Mark(perf_counter(), sum(times[:8]) - idle, own)


def others_share(before: Mark, after: Mark) -> float:
    """Returns the share of the machine that others used in between; children must have ended."""
    cores = psutil.cpu_count() or 1
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    share = others_s / (cores * max(after.at_s - before.at_s, 1e-9))
    # The kernel counts in ticks of 10 ms, so a short time can seem more than full.
    return min(1.0, max(0.0, share))
