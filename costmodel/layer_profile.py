"""Times of the layers of a profiled graph: as measured, in proportion to the samples."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.costmodel.compute import OpTime
from meshwright.costmodel.formulas import SOURCE_BAND
from meshwright.costmodel.local_op import LocalOp
from meshwright.ir.device import DeviceType
from meshwright.ir.graph import Graph
from meshwright.ir.profiled_graph import LAYER


@dataclass(frozen=True, slots=True)
class LayerTimer:
    """An OpTimer that knows the layers of one graph."""

    seconds: Mapping[str, tuple[float, float]]
    """Op target -> forward and backward seconds of one sample."""

    def __call__(self, op: LocalOp, device: DeviceType) -> OpTime | None:
        found = self.seconds.get(op.target)
        if found is None:
            return None
        samples = op.inputs[0].shape[0]
        forward_s, backward_s = (samples * seconds for seconds in found)
        # A profile has one backward time; a layer with weights is taken to halve it, as a matmul.
        weight_s = 0.5 * backward_s if any(i.is_param for i in op.inputs) else 0.0
        band = SOURCE_BAND["measured"]
        return OpTime(forward_s, backward_s - weight_s, weight_s, "measured", band)


def layer_timer(graph: Graph) -> LayerTimer | None:
    """The timer of a graph that was made from a layer profile; None for any other."""
    seconds = {}
    for op in graph.ops:
        if op.target.startswith(LAYER + "."):
            forward_s, backward_s = op.arg("forward_s"), op.arg("backward_s")
            assert isinstance(forward_s, float) and isinstance(backward_s, float)
            seconds[op.target] = (forward_s, backward_s)
    return LayerTimer(seconds) if seconds else None
