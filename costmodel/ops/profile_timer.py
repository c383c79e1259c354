"""The op times of a profile for all device types of a cluster."""

from meshwright.costmodel.ops.compute import OpTime, OpTimer
from meshwright.costmodel.ops.keys import op_key
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.costmodel.ops.profiled_ops import ProfileTimer
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.profile.profile import Profile


def profile_timer(cluster: Cluster, profile: Profile | None) -> OpTimer | None:
    """None if there is no profile, or none of its ops was measured."""
    if profile is None or not profile.ops:
        return None
    kind = profile.machine.kind
    timers = {
        device.name: ProfileTimer(profile, device, op_key)
        for device in cluster.device_types
        if device.kind == kind
    }

    def time(op: LocalOp, device: DeviceType) -> OpTime | None:
        timer = timers.get(device.name)
        return timer(op, device) if timer else None

    return time
