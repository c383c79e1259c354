"""Seconds of a call that is a collective and the ops beside it, and of the separate ones.

Both are made of the same curves, of ops and of links. What a kernel reads from peers takes as long
as the collective that moves the same bytes, less the latency that the kernel does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.costmodel.block.overlap import slowing
from meshwright.costmodel.block.price_ops import PricedMove, PricedOp, Walk
from meshwright.costmodel.comm.comm import collective_band, collective_time
from meshwright.costmodel.ops.compute import OpTime, worst_source
from meshwright.costmodel.ops.formulas import SOURCE_BAND, KernelWork, curve_of, kernel_s, memory_s
from meshwright.costmodel.stage.program import IDLE, Do, Step, play, run
from meshwright.ir.cluster.device import OpClass, Source
from meshwright.ir.kernels import load
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard
from meshwright.ir.placed import looks, peers
from meshwright.ir.placed.spots import KernelSpot, LaidBlock

TILE_SHARE = 0.9
"""Of the library's rate, that our kernels' products reach; an assumption, not measured."""


@dataclass(frozen=True, slots=True)
class JointTime:
    """Seconds of one direction."""

    separate_s: float
    joint_s: float
    sent_s: float
    """Of `separate_s`: the collective."""

    @property
    def saved_s(self) -> float:
        return self.separate_s - self.joint_s


@dataclass(frozen=True, slots=True)
class Price:
    """A call in the place of separate ones, for one micro-batch on one rank."""

    axis: str
    forward: JointTime
    backward: JointTime
    source: Source
    band: float
    """Relative error to expect."""
    why: str = ""
    """Why no kernel takes such values."""

    @property
    def ratio(self) -> float:
        """Times as long as separate calls."""
        separate_s = self.forward.separate_s + self.backward.separate_s
        return (self.forward.joint_s + self.backward.joint_s) / separate_s if separate_s else 1.0


def prices(walk: Walk, laid: LaidBlock) -> dict[tuple[str, str], Price]:
    """(kernel, `Op.key`) -> price, of all calls that can be made in a block."""
    found: dict[tuple[str, str], Price] = {}
    for kernel, look in looks().items():
        for spot in look(laid):
            if not spot.why:
                make = _MAKE.get(kernel) or load(kernel).price
                found[kernel, spot.op.key] = make(JointPlace.of(walk, spot))
    return found


@dataclass(frozen=True)
class JointPlace:
    """A spot as the walk has priced it."""

    walk: Walk
    spot: KernelSpot
    steps: tuple[PricedOp, ...]
    """The ops."""
    move: PricedMove
    """The conversion."""

    @classmethod
    def of(cls, walk: Walk, spot: KernelSpot) -> "JointPlace":
        names = [op.name for op in (spot.op, *spot.others)]
        steps = [
            step for step in walk.trail if isinstance(step, PricedOp) and step.op.name in names
        ]
        assert spot.conversion is not None
        moved = {*spot.op.inputs, *spot.op.outputs, *(spot.via.inputs if spot.via else ())}
        move = next(
            move for move in walk.trail
            if isinstance(move, PricedMove) and move.name in moved and move.axis == spot.axis
            and move.conversion == spot.conversion
        )  # fmt: skip
        return cls(walk, spot, tuple(steps), move)

    def times(self) -> list[OpTime]:
        return [step.time for step in self.steps]

    def sent_s(self, primitive: Primitive) -> float:
        """Of the collective alone, with its packing."""
        return self.walk.site.primitive_s(primitive, self.move.nbytes, self.move.axis)

    def read_s(self, primitive: Primitive, nbytes: float) -> float:
        """The same bytes read by a kernel: without the latency of launching and of steps."""
        levels = self.walk.site.levels[self.move.axis]
        return collective_time(primitive, nbytes, levels) - collective_time(primitive, 0, levels)

    @property
    def barrier_s(self) -> float:
        """Until every rank has seen the others' signals."""
        levels = self.walk.site.levels[self.move.axis]
        return sum(level.link.latency_s for level in levels)

    def memory_s(self, op_class: OpClass, nbytes: float) -> float:
        device = self.walk.site.device
        return kernel_s(KernelWork(op_class, self.steps[0].local.dtype, 0.0, nbytes), device)

    def price(
        self, forward: JointTime, backward: JointTime, *, assumed: bool, why: str = ""
    ) -> Price:
        """With the least certain source, and the widest band, of what it is made of."""
        levels = self.walk.site.levels[self.move.axis]
        times = self.times()
        sources = [level.link.source for level in levels] + [time.source for time in times]
        if assumed:
            sources.append("assumption")
        bands = [collective_band(levels, self.move.nbytes), *(time.band for time in times)]
        band = max(*bands, SOURCE_BAND["assumption"] if assumed else 0.0)
        return Price(self.move.axis, forward, backward, worst_source(sources), band, why)


def _gather_linear(place: JointPlace) -> Price:
    """Parts come while the products of those that are there are made; the backward multiplies the
    gradients, side by side if there are several, and scatters, with the weights' products made
    before it waits."""
    times = place.times()
    weights_s = sum(time.backward_weight_s for time in times)
    back = _scattering(place, sum(time.backward_input_s for time in times), weights_s)
    if len(times) > 1:
        joined = sum(step.local.output_bytes for step in place.steps)
        joined_s = place.memory_s(OpClass.COPY, 2.0 * joined)
        back = replace(back, joint_s=back.joint_s + joined_s)
    forward = _gathering(place, sum(time.forward_s for time in times))
    return place.price(forward, back, assumed=True, why=_why_no_product(place))


def _linear_scatter(place: JointPlace) -> Price:
    """Parts leave as they are made; the backward gathers while it multiplies."""
    (time,) = place.times()
    back = _gathering(place, time.backward_input_s)
    forward = _scattering(place, time.forward_s)
    return place.price(forward, back, assumed=True, why=_why_no_product(place))


def _gathering(place: JointPlace, product_s: float) -> JointTime:
    sent_s = place.sent_s(Primitive.ALL_GATHER)
    joint_s = _while_parts_come(place, sent_s, product_s / TILE_SHARE) + place.barrier_s
    return JointTime(sent_s + product_s, joint_s, sent_s)


def _scattering(place: JointPlace, product_s: float, beside_s: float = 0.0) -> JointTime:
    """`beside_s`: other work between the product and the sum."""
    sent_s = place.sent_s(Primitive.REDUCE_SCATTER)
    joint_s = _while_parts_leave(place, sent_s, product_s / TILE_SHARE, beside_s)
    return JointTime(sent_s + product_s + beside_s, joint_s, sent_s)


def _while_parts_come(place: JointPlace, sent_s: float, product_s: float) -> float:
    """The rank's own part is there at once, and each other one after an equal share of the time."""
    ranks = place.move.size
    turns = [Step(Do.START, sent_s / (ranks - 1), job, "") for job in range(1, ranks)]
    for part in range(ranks):
        turns += [Step(Do.WAIT, 0.0, part, "")] if part else []
        turns.append(run(product_s / ranks, ""))
    return play(turns, IDLE, slowing(place.walk, place.move))[0]


def _while_parts_leave(
    place: JointPlace, sent_s: float, product_s: float, beside_s: float
) -> float:
    """The rank's own part is the last; then a pass sums what all have sent."""
    ranks = place.move.size
    turns: list[Step] = []
    for part in range(1, ranks):
        turns += [run(product_s / ranks, ""), Step(Do.START, sent_s / (ranks - 1), part, "")]
    turns += [run(product_s / ranks + beside_s, ""), Step(Do.WAIT, 0.0, ranks - 1, "")]
    summed_s = place.memory_s(OpClass.ELEMENTWISE, place.move.nbytes * (1 + 1 / ranks))
    return play(turns, IDLE, slowing(place.walk, place.move))[0] + summed_s


def _why_no_product(place: JointPlace) -> str:
    dtype, conversion = place.steps[0].local.dtype, place.move.conversion
    if dtype not in peers.DTYPES:
        return f"no kernel multiplies {dtype}"
    shard = conversion.source if isinstance(conversion.source, Shard) else conversion.target
    assert isinstance(shard, Shard)
    size = place.walk.facts.graph.tensors[place.move.name].shape[shard.dim]
    if size % place.move.size:
        return f"{size} do not split into {place.move.size} equal parts"
    return ""


def _reduce_norm(place: JointPlace) -> Price:
    """The sum is not written and read again. Both ways copy the summands once."""
    (time,), nbytes, ranks = place.times(), place.move.nbytes, place.move.size
    sent_s = place.sent_s(Primitive.ALL_REDUCE)
    copied_s = sent_s - collective_time(
        Primitive.ALL_REDUCE, nbytes, place.walk.site.levels[place.move.axis]
    )
    if nbytes <= peers.ONE_SHOT_BYTES:
        read_s = place.read_s(Primitive.ALL_GATHER, ranks * nbytes) + place.barrier_s
    else:
        read_s = sum(place.read_s(p, nbytes) for p in (Primitive.REDUCE_SCATTER,
                     Primitive.ALL_GATHER)) + 2 * place.barrier_s  # fmt: skip
    device = place.walk.site.device
    unread_s = memory_s(nbytes, curve_of(OpClass.NORMALIZATION, device), device)
    joint_s = copied_s + read_s + max(time.forward_s - unread_s, 0.0)
    width = place.steps[0].local.outputs[0][-1]
    why = f"no program holds rows of {width}" if width > peers.MOST_WIDTH else ""
    forward = JointTime(sent_s + time.forward_s, joint_s, sent_s)
    back = JointTime(time.backward_input_s, time.backward_input_s, 0.0)
    return place.price(forward, back, assumed=False, why=why)


_MAKE: dict[str, Callable[[JointPlace], Price]] = {
    "gather_linear": _gather_linear,
    "linear_scatter": _linear_scatter,
    "reduce_norm": _reduce_norm,
}
