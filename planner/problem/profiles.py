"""Whether a profile tells anything about a cluster."""

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.profile import Profile


def check_profile(profile: Profile, cluster: Cluster) -> None:
    """PlanError if none of the cluster's devices is of the kind that was measured."""
    kinds = sorted({device.kind for device in cluster.device_types})
    if profile.machine.kind not in kinds:
        raise PlanError(
            f"the profile is of a {profile.machine.kind} device ({profile.machine}) and cluster "
            f"{cluster.name} has {', '.join(kinds)}: profile a machine of the cluster"
        )


def profile_notes(profile: Profile | None, cluster: Cluster) -> tuple[str, ...]:
    """What a reader should know of where the figures come from."""
    if profile is None:
        return ()
    measured, notes = profile.machine, []
    others = [d.name for d in cluster.device_types if d.kind != measured.kind]
    if others:
        notes.append(f"the profile says nothing of {', '.join(others)}")
    alike = [d for d in cluster.device_types if d.kind == measured.kind == "cuda"]
    notes += [
        f"the profile is of {measured.device}; {device.name} is taken to be the same"
        for device in alike
        if not same_device(device.name, measured.device)
    ]
    return tuple(notes)


def same_device(preset: str, measured: str) -> bool:
    """Whether `h100-sxm` may be what the driver calls `NVIDIA H100 80GB HBM3`."""
    words = measured.lower().replace("-", " ").split()
    return preset.lower().split("-")[0] in words
