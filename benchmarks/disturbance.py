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

from tests.spawn import run_ranks

LOOK_S, WARM = 0.6, 3
"""How long a look at the pace takes, after so many steps."""
ROWS, WIDTH = 400, 384


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the clocks stood."""

    at_s: float
    busy_s: float
    """Of all cores, whoever used them."""
    own_s: float
    """Of this process and its children that have ended."""


def pace_s() -> float:
    """Seconds of a fixed step of a small network, now, while every core runs one."""
    return max(run_ranks(psutil.cpu_count() or 1, _pace_s))


def _pace_s() -> float:
    """The median of those that fit into the look."""
    network = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )
    batch = torch.ones(ROWS, WIDTH)
    taken: list[float] = []

    def step() -> None:
        start = perf_counter()
        network.zero_grad(set_to_none=True)
        network(batch).square().mean().backward()
        taken.append(perf_counter() - start)

    for _ in range(WARM):
        step()
    dist.barrier()
    end = perf_counter() + LOOK_S
    while perf_counter() < end:
        step()
    return median(taken[WARM:])


def mark() -> Mark:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(u.ru_utime + u.ru_stime for u in used)
    return Mark(perf_counter(), sum(times[:8]) - idle, own)


def others_share(before: Mark, after: Mark) -> float:
    """Share of the machine that others used in between; children must have ended."""
    cores = psutil.cpu_count() or 1
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    share = others_s / (cores * max(after.at_s - before.at_s, 1e-9))
    # The kernel counts in ticks of 10 ms, so a short time can seem more than full.
    return min(1.0, max(0.0, share))
