"""Whether others used the machine's cores while something was measured."""

import resource
from dataclasses import dataclass
from time import perf_counter

import psutil


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the clocks stood."""

    at_s: float
    busy_s: float
    """Of all cores, whoever used them."""
    own_s: float
    """Of this process and its children that have ended."""


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
