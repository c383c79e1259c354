"""Seconds of copies between a device and the host's memory, and those that computing waits for.

As `runtime.stage.offload_buffers` copies: a block's values leave when it has run, at most two
blocks' at a time, and come back one block ahead of their backward. On a CPU nothing goes on beside
a copy.
"""

from collections.abc import Sequence

from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.cluster.links import PCIE_4
from meshwright.ir.presets import PRESETS
from meshwright.ir.profile.profile import Profile

_SHARE = 0.8
"""Of the host link's bandwidth that large copies over pinned memory reach; assumption."""


def copy_s(device: DeviceType, nbytes: int, profile: Profile | None = None) -> float:
    """One way. On a CPU it is a copy within its memory."""
    if not nbytes:
        return 0.0
    if device.kind == "cpu":
        return memory_s(2 * nbytes, curve_of(OpClass.COPY, device), device)
    return nbytes / (_measured(device, profile) or _by_data_sheet(device))


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


def _by_data_sheet(device: DeviceType) -> float:
    bus = PRESETS[device.name].bus if device.name in PRESETS else PCIE_4
    return bus.bandwidth_bytes_per_s * _SHARE


def leaving_s(computing_s: Sequence[float], copies_s: Sequence[float]) -> list[float]:
    """Per block in order of the forward, for how long it waits when it has run."""
    now, ends, found = 0.0, [0.0, 0.0], []
    for own_s, copy in zip(computing_s, copies_s, strict=True):
        now += own_s
        wait = ends[-2] - now if copy and ends[-2] > now else 0.0
        now += wait
        found.append(wait)
        if copy:
            ends.append((now if now > ends[-1] else ends[-1]) + copy)
    return found


def arriving_s(computing_s: Sequence[float], copies_s: Sequence[float]) -> list[float]:
    """Per block in order of the backward, for how long it waits before it runs."""
    now, ready, found = 0.0, 0.0, []
    last = len(copies_s) - 1
    for i, own_s in enumerate(computing_s):
        if i == 0:
            ready = copies_s[0]
        wait = ready - now if copies_s[i] and ready > now else 0.0
        now += wait
        found.append(wait)
        if i < last:  # asked for as this block begins
            ready = (now if now > ready else ready) + copies_s[i + 1]
        now += own_s
    return found
