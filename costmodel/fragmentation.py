"""What the allocator holds beyond live tensors."""

from dataclasses import dataclass

from meshwright.costmodel.overheads import CPU_FRAGMENTATION
from meshwright.ir.device import DeviceType
from meshwright.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Relative to tensors that come and go in a step, and to those that stay until its end."""

    moving: float
    state: float = 0.0


def fragmentation_of(device: DeviceType, profile: Profile | None, model: str) -> Fragmentation:
    """As measured with this model (the fingerprint of its graph), or with any; else assumed."""
    known = profile.memory if profile and profile.machine.kind == device.kind else {}
    own = known.get(f"fragmentation {model}")
    if own is not None:
        state = known.get(f"fragmentation_state {model}")
        return Fragmentation(own.value, state.value if state else 0.0)
    if "fragmentation" in known:
        return Fragmentation(known["fragmentation"].value)
    return Fragmentation(CPU_FRAGMENTATION if device.kind == "cpu" else 0.0)
