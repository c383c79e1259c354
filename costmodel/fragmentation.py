"""What the allocator holds beyond live tensors."""

from dataclasses import dataclass

from meshwright.costmodel.overheads import CPU_FRAGMENTATION
from meshwright.ir.device import DeviceType
from meshwright.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Relative to what comes and goes with micro-batches, and to gradients, that do with steps."""

    moving: float
    gradients: float = 0.0


def fragmentation_of(device: DeviceType, profile: Profile | None, model: str) -> Fragmentation:
    """As measured with this model (the fingerprint of its graph), or with any; else assumed."""
    known = profile.memory if profile and profile.machine.kind == device.kind else {}
    own = known.get(f"fragmentation {model}")
    if own is not None:
        gradients = known.get(f"fragmentation_gradients {model}")
        return Fragmentation(own.value, gradients.value if gradients else 0.0)
    if "fragmentation" in known:
        return Fragmentation(known["fragmentation"].value)
    return Fragmentation(CPU_FRAGMENTATION if device.kind == "cpu" else 0.0)
