"""Where a block runs, and what moving values between the ranks of one of its axes takes there."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from meshwright.costmodel.comm.comm import Levels, collective_time, ranks_of, send_time
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis
from meshwright.ir.layout.op_messages import SHIFT, Inner
from meshwright.ir.styles import Style, style

USUAL = style("")


@dataclass(frozen=True)
class StageSite:
    """One rank's view of its stage."""

    axes: Mapping[str, Axis]
    coordinates: Mapping[str, int]
    device: DeviceType
    levels: Mapping[str, Levels]
    """Tiers of the rank's group on each axis."""
    run_as: Style = USUAL
    """The stack that runs it."""

    def primitive_s(self, primitive: Primitive, whole_bytes: int, axis: str) -> float:
        """A primitive of `ir.layout.conversions` on a value of so many bytes as if whole on the
        axis."""
        if primitive is Primitive.IDENTITY:
            return 0.0
        # Reading, and writing or packing, beside the transfer.
        local = self._copied_s(whole_bytes / self.axes[axis].size)
        return collective_time(primitive, whole_bytes, self.levels[axis]) + local

    def inner_s(self, message: Inner, axis: str) -> float:
        """The messages that an op sends by itself; no time where no tiers are given."""
        if message.kind == SHIFT:
            sent = (send_time(message.nbytes, level.link) for level in self.levels[axis])
            one = max(sent, default=0.0)
            return message.times * (one + self._copied_s(message.nbytes))
        primitive, times = Primitive(message.kind), message.times * message.crowd
        if message.routing:
            return times * self._routed_s(primitive, message, message.routing, axis)
        return times * self.primitive_s(primitive, message.nbytes, axis)

    def _routed_s(self, primitive: Primitive, message: Inner, routing: Routing, axis: str) -> float:
        """Tokens to their experts, or home, with as many copies as the stack makes of each."""
        if message.outer > 1 and self.run_as.token_to != "rank":
            return 0.0  # its one all-to-all is priced on the outermost axis, whose links are slower
        levels, ranks = self.levels[axis], self.axes[axis].size
        copies = once = routing.copies(ranks)
        nodes = ranks_of(levels[1:])
        outside = routing.copies(nodes) if nodes > 1 else 0.0
        match self.run_as.token_to:
            case "rank":
                return self.primitive_s(primitive, message.nbytes, axis)
            case "expert":
                copies, outside = float(routing.picked), 0.0
            case "neighbours":
                copies = float(min(ranks, ceil(routing.picked / message.held)))
                outside = outside and ceil(copies * nodes / ranks)
        if not outside:
            return self.primitive_s(primitive, round(message.nbytes * copies / once), axis)
        # Both tiers work at once: the outer ones carry a copy for each node.
        inside = message.nbytes * copies / once / nodes
        inside_s = collective_time(primitive, inside, levels[:1])
        return max(
            self.primitive_s(primitive, round(message.nbytes * outside / once), axis), inside_s
        )

    def _copied_s(self, nbytes: float) -> float:
        curve = curve_of(OpClass.COPY, self.device)
        return memory_s(nbytes, curve, self.device) + self.device.overhead_s
