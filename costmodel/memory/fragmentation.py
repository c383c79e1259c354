"""What the allocator holds beyond live tensors."""

from dataclasses import dataclass

from meshwright.costmodel.ops.overheads import CPU_FRAGMENTATION
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Relative to what comes and goes with micro-batches, and to gradients, that do with steps."""

    moving: float
    gradients: float = 0.0


def record_names(model: str) -> tuple[str, str]:
    """Of the two ratios in a profile; `model` is the fingerprint of its graph."""
    return f"fragmentation {model}", f"fragmentation_gradients {model}"


def fragmentation_of(device: DeviceType, profile: Profile | None, model: str) -> Fragmentation:
    return fragmentation_on(device.kind, profile, model)


def fragmentation_on(kind: str, profile: Profile | None, model: str) -> Fragmentation:
    """On devices of a kind (`cuda` or `cpu`): as measured with this model (the fingerprint of its
    graph), or with any; else assumed."""
    known = profile.memory if profile and profile.machine.kind == kind else {}
    own, gradients = map(known.get, record_names(model))
    if own is not None:
        return Fragmentation(own.value, gradients.value if gradients else 0.0)
    if "fragmentation" in known:
        return Fragmentation(known["fragmentation"].value)
    return Fragmentation(CPU_FRAGMENTATION if kind == "cpu" else 0.0)
