"""Times of the layers of a profiled graph: as measured, in proportion to the samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.ops.formulas import SOURCE_BAND
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import LAYER


@dataclass(frozen=True, slots=True)
class LayerTimer:
    """An OpTimer that knows the layers of one graph."""

    seconds: Mapping[str, tuple[float, float]]
    """Op target -> forward and backward seconds of one sample."""
    speeds: Mapping[str, float]
    """Device type -> how many times as fast as measured; empty where the profile is of the one
    device type that there is."""

    def __call__(self, op: LocalOp, device: DeviceType) -> OpTime | None:
        found = self.seconds.get(op.target)
        if found is None:
            return None
        samples = op.inputs[0].shape[0] / self.speeds.get(device.name, 1.0)
        forward_s, backward_s = (samples * seconds for seconds in found)
        # A profile has one backward time; a layer with weights is taken to halve it, as a matmul.
        weight_s = 0.5 * backward_s if any(i.is_param for i in op.inputs) else 0.0
        band = SOURCE_BAND["measured"]
        return OpTime(forward_s, backward_s - weight_s, weight_s, "measured", band)


def layer_timer(graph: Graph) -> LayerTimer | None:
    """The timer of a graph that was made from a layer profile; None for any other."""
    seconds = {}
    speeds: dict[str, float] = {}
    for op in graph.ops:
        if op.target.startswith(LAYER + "."):
            forward_s, backward_s = op.arg("forward_s"), op.arg("backward_s")
            assert isinstance(forward_s, float) and isinstance(backward_s, float)
            seconds[op.target] = (forward_s, backward_s)
            speeds = dict(dict(op.args).get("speeds", ()))  # type: ignore[arg-type]
    return LayerTimer(seconds, speeds) if seconds else None


def check_devices(graph: Graph, devices: Sequence[str]) -> None:
    """PlanError where a layer profile does not say how fast some of several device types are."""
    timer = layer_timer(graph)
    if timer is None:
        return
    missing = [name for name in dict.fromkeys(devices) if name not in timer.speeds]
    if missing and (timer.speeds or len(set(devices)) > 1):
        raise PlanError(
            f"the layer profile does not say how fast {', '.join(missing)} is: give "
            "`profiled_graph` speeds of all device types, 1.0 for the one that was measured"
        )
