"""Where a block runs, and what moving values between the ranks of one of its axes takes there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.costmodel.comm.comm import Levels, collective_time, ranks_of, send_time
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis, Strategy
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
    shares_cores: bool = False
    """Whether processes do: what sends a message takes them from computing beside it."""
    own_levels: Levels | None = None
    """Of dp, those within a replica, where replicas train alone; None: they do not."""

    def primitive_s(self, primitive: Primitive, whole_bytes: int, axis: str) -> float:
        """A primitive of `ir.layout.conversions` on a value of so many bytes as if whole on the
        axis."""
        if primitive is Primitive.IDENTITY:
            return 0.0
        return self._among(primitive, whole_bytes, self.axes[axis].size, self.levels[axis])

    def conversion_s(self, primitive: Primitive, whole_bytes: int, axis: str) -> float:
        """The same of a conversion of a block: a sum over dp is one within the replica, where
        replicas train alone."""
        if primitive is Primitive.ALL_REDUCE and axis == "dp" and self.own_levels is not None:
            return self._in_replica(primitive, whole_bytes, self.own_levels)
        return self.primitive_s(primitive, whole_bytes, axis)

    def _in_replica(self, primitive: Primitive, whole_bytes: int, own: Levels) -> float:
        return self._among(primitive, whole_bytes, ranks_of(own), own) if own else 0.0

    def _among(self, primitive: Primitive, whole_bytes: int, ranks: int, levels: Levels) -> float:
        # Reading, and writing or packing, beside the transfer.
        local = self._copied_s(whole_bytes / ranks)
        return collective_time(primitive, whole_bytes, levels) + local

    def split_of(self, strategies: Mapping[str, Strategy]) -> list[tuple[Strategy, int]]:
        """An op's strategy on each axis of more than one rank, and how many ranks that has."""
        sizes = ((strategy, self.axes[axis].size) for axis, strategy in strategies.items())
        return [(strategy, size) for strategy, size in sizes if size > 1]

    def inner_s(self, message: Inner, axis: str, outside: Sequence[str] = ()) -> float:
        """The messages that an op sends by itself; no time where no tiers are given. `outside`: the
        axes that have cut experts before this one."""
        if message.kind == SHIFT:
            sent = (send_time(message.nbytes, level.link) for level in self.levels[axis])
            one = max(sent, default=0.0)
            return message.times * (one + self._copied_s(message.nbytes))
        primitive, times = Primitive(message.kind), message.times * message.crowd
        if message.routing:
            whole_s = self._routed_s(primitive, message, message.routing, axis, outside)
            return times * self.run_as.travel_shown * whole_s
        if message.of_replica and axis == "dp" and self.own_levels is not None:
            return times * self._in_replica(primitive, message.nbytes, self.own_levels)
        return times * self.primitive_s(primitive, message.nbytes, axis)

    def _routed_s(
        self, primitive: Primitive, message: Inner, routing: Routing, axis: str,
        outside: Sequence[str],
    ) -> float:  # fmt: skip
        """Tokens to their experts, or home, with as many copies as the stack makes of each. They
        are packed by the kernels that put them into order (`ops/routing.py`)."""
        if self.run_as.token_to == "rank":
            return collective_time(primitive, message.nbytes, self.levels[axis])
        parts = self.axes[axis].size * message.outer
        own_bytes = message.nbytes / routing.copies(parts) / self.axes[axis].size

        def sent_s(along: str) -> float:
            return self._sent_s(primitive, own_bytes, message.held, routing, parts, along)

        # Its one all-to-all is over all axes at once: the slowest links set the pace.
        return max(0.0, sent_s(axis) - max(map(sent_s, outside), default=0.0))

    def _sent_s(
        self, primitive: Primitive, own_bytes: float, held: int, routing: Routing, parts: int,
        axis: str,
    ) -> float:  # fmt: skip
        """Of an all-to-all of a stack what the links of one axis take. `own_bytes`: of a rank's
        tokens, each once; `parts`: in how many runs of `held` experts lie."""
        levels, ranks = self.levels[axis], self.axes[axis].size
        nodes, whole = ranks_of(levels[1:]), own_bytes * ranks
        copies = routing.copies(parts)
        outside = routing.copies(nodes) if nodes > 1 else 0.0
        match self.run_as.token_to:
            case "expert":
                copies, outside = float(routing.picked), 0.0
            case "neighbours":
                copies = float(min(parts, ceil(routing.picked / held)))
                outside = outside and ceil(copies * nodes / parts)
        if not outside:
            return collective_time(primitive, round(whole * copies), levels)
        # Both tiers work at once: the outer ones carry a copy for each node.
        inside_s = collective_time(primitive, whole * copies / nodes, levels[:1])
        return max(collective_time(primitive, round(whole * outside), levels), inside_s)

    def _copied_s(self, nbytes: float) -> float:
        curve = curve_of(OpClass.COPY, self.device)
        return memory_s(nbytes, curve, self.device) + self.device.overhead_s
