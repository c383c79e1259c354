"""What the ops of a block send on an axis, and the seconds of it by the links of a site."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.costmodel.block.clock import BlockSums
from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.comm.comm import collective_band
from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.stage.program import IDLE, Do, Overlap, Step, play, run
from meshwright.ir.layout.conversions import Conversion, Primitive
from meshwright.ir.layout.op_messages import Inner, Leg


class MoveSent(NamedTuple):
    """A conversion of a value."""

    axis: str
    nbytes: int
    """Of the value as if whole on the axis."""
    conversion: Conversion
    has_gradient: bool

    def tell(self, clock: BlockSums, site: StageSite) -> None:
        axis, nbytes, conversion, has_gradient = self
        forward_s = site.conversion_s(conversion.forward, nbytes, axis)
        backward_s = site.conversion_s(conversion.backward, nbytes, axis) if has_gradient else 0.0
        _communicate(clock, site, axis, forward_s, backward_s, nbytes)
        if conversion.forward is Primitive.REDUCE_SCATTER:
            clock.scattered_bytes += nbytes
        if site.run_as.regathers and has_gradient and conversion.forward is Primitive.ALL_GATHER:
            _communicate(clock, site, axis, 0.0, forward_s, nbytes)


class Needed(NamedTuple):
    """Not sent, but as much part of a walk: a backward needs what was made so far."""

    def tell(self, clock: BlockSums, site: StageSite) -> None:
        clock.need()


NEEDED = Needed()


class InnerSent(NamedTuple):
    """What an op sends by itself. What it sends while it computes takes the longer."""

    axis: str
    nbytes: int
    """Of the largest message."""
    forward: tuple[Inner, ...]
    backward: tuple[Inner, ...]
    time: OpTime
    """Of the op."""
    outside: tuple[str, ...] = ()
    """Axes that have cut the experts before this one does, where it is tokens that travel."""

    def tell(self, clock: BlockSums, site: StageSite) -> None:
        forward_s = self._exposed_s(self.forward, site, self.time.forward_s)
        backward_s = self._exposed_s(self.backward, site, self.time.backward_input_s)
        _communicate(clock, site, self.axis, forward_s, backward_s, self.nbytes)

    def leg_s(self, site: StageSite, leg: Leg, *, back: bool) -> float:
        """Seconds of what goes out, or comes home, where tokens travel: in a forward, or back."""
        messages = self.backward if back else self.forward
        return sum(site.inner_s(m, self.axis, self.outside) for m in messages if m.leg == leg)

    def _exposed_s(self, messages: Sequence[Inner], site: StageSite, computing_s: float) -> float:
        times = [(site.inner_s(m, self.axis, self.outside), m.beside) for m in messages]
        beside = sum(seconds for seconds, is_beside in times if is_beside)
        alone = sum(seconds for seconds, is_beside in times if not is_beside)
        if not beside or site.shares_cores:
            return alone + beside
        # It computes on what it has, then on what came: nothing comes beside the last part.
        ranks = site.axes[self.axis].size
        besides_s = computing_s * (ranks - 1) / ranks
        slower = Overlap.worst([x.link.slowdowns(self.nbytes) for x in site.levels[self.axis]])
        steps = [Step(Do.START, beside, 0, ""), run(besides_s, ""), Step(Do.WAIT, 0.0, 0, "")]
        return alone + play(steps, IDLE, slower)[0] - besides_s


def _communicate(
    clock: BlockSums, site: StageSite, axis: str, forward_s: float, backward_s: float, nbytes: int
) -> None:
    levels = site.levels[axis]
    if site.device.launching:
        ranks = site.axes[axis].size
        clock.call(site.device.launching, bool(forward_s), bool(backward_s), ranks)
    clock.communicate(forward_s, backward_s, collective_band(levels, nbytes))
    if forward_s or backward_s:
        clock.sources.update([level.link.source for level in levels])
