"""Seconds of copies between a device and the host's memory, and those that computing waits for.

As `runtime.stage.offload_buffers` copies: a block's values leave when it has run, at most two
blocks' at a time, and come back one block ahead of their backward. On a CPU nothing goes on beside
a copy.
"""

from collections.abc import Sequence

from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.cluster.host import link_rate
from meshwright.ir.profile.profile import Profile


def copy_s(device: DeviceType, nbytes: int, profile: Profile | None = None) -> float:
    """One way. On a CPU it is a copy within its memory, unless its host is apart."""
    if not nbytes:
        return 0.0
    if not device.is_apart:
        return memory_s(2 * nbytes, curve_of(OpClass.COPY, device), device)
    return nbytes / (_measured(device, profile) or link_rate(device))


def _measured(device: DeviceType, profile: Profile | None) -> float:
    """Bytes per second of the largest copies, the slower way; 0 if nobody has measured."""
    if profile is None or profile.machine.kind != device.kind:
        return 0.0
    largest: dict[str, tuple[int, float]] = {}
    for record in profile.copies:
        if record.direction != "within" and record.time.median_s > 0.0:
            found = (record.nbytes, record.nbytes / record.time.median_s)
            largest[record.direction] = max(found, largest.get(record.direction, (0, 0.0)))
    return min((rate for _, rate in largest.values()), default=0.0)


def leaving_s(computing_s: Sequence[float], copies_s: Sequence[float]) -> list[float]:
    """Per block in order of the forward, for how long it waits when it has run."""
    return leaving(computing_s, copies_s)[0]


def leaving(computing_s: Sequence[float], copies_s: Sequence[float]) -> tuple[list[float], float]:
    """Per block in the order in which they run, for how long it waits when it has run, as no more
    than two blocks' copies are on their way; and for how long the last copies go on."""
    now, ends, found = 0.0, [0.0, 0.0], []
    for own_s, copy in zip(computing_s, copies_s, strict=True):
        now += own_s
        wait = ends[-2] - now if copy and ends[-2] > now else 0.0
        now += wait
        found.append(wait)
        if copy:
            ends.append((now if now > ends[-1] else ends[-1]) + copy)
    return found, max(0.0, ends[-1] - now)


def coming_s(computing_s: Sequence[float], copies_s: Sequence[float]) -> list[float]:
    """Per block in the order in which they run, for how long it waits for its copy, where all
    copies begin at once, one after the other in that order."""
    now = ready = 0.0
    found = []
    for own_s, copy in zip(computing_s, copies_s, strict=True):
        ready += copy
        wait = ready - now if copy and ready > now else 0.0
        found.append(wait)
        now += wait + own_s
    return found


def arriving_s(
    computing_s: Sequence[float], copies_s: Sequence[float], ahead: int = 1
) -> list[float]:
    """Per block in the order in which they run, for how long it waits before it runs, where copies
    are asked for so many blocks ahead of their own."""
    now = ready = 0.0
    ends: list[float] = []
    found = []
    for i, own_s in enumerate(computing_s):
        if len(ends) == i:  # nobody asked ahead
            ready = max(now, ready) + copies_s[i]
            ends.append(ready)
        wait = ends[i] - now if copies_s[i] and ends[i] > now else 0.0
        now += wait
        found.append(wait)
        for copy in copies_s[len(ends) : i + ahead + 1]:  # asked for as this block begins
            ready = max(now, ready) + copy
            ends.append(ready)
        now += own_s
    return found
