"""Times of ops from a profile: measured, interpolated between measured sizes, or by fitted curves.

Every answer rests on the class's formula: between measured sizes it is the ratio of measured to
formula that is interpolated, so that shapes which fill their tiles badly stay slow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from meshwright.costmodel.fit.fit_compute import record_work
from meshwright.costmodel.ops.compute import OpTime, OpTimer, formula, with_dispatch
from meshwright.costmodel.ops.formulas import kernel_s
from meshwright.costmodel.ops.kernel_work import as_attended, forward_work
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import COMPUTE, DeviceType, OpClass
from meshwright.ir.profile.profile import OpRecord, Profile

_LEAST_BAND = 0.02
_INTERPOLATED_BAND = 0.04
_BAND_PER_OCTAVE = 0.03
"""Assumption: how much less is known at twice or half the size of a measured op."""
_NEAR = log(4.0)
"""Beyond four times or a quarter of the nearest measured size the class's curve answers."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A measured op beside what the formula says of it."""

    record: OpRecord
    size: float
    """log of its seconds by the formula."""
    error: float
    """log of measured over formula."""


def profile_timer(profile: Profile, cluster: Cluster, key: Callable[[LocalOp], str]) -> OpTimer:
    """For all devices of a calibrated cluster that are of the kind that was measured."""
    timers = {
        device.name: ProfileTimer(profile, device, key)
        for device in cluster.device_types
        if device.kind == profile.machine.kind
    }

    def timer(op: LocalOp, device: DeviceType) -> OpTime | None:
        known = timers.get(device.name)
        return known(op, device) if known else None

    return timer


class ProfileTimer:
    """An OpTimer over the ops that were measured on a device.

    `device` is the calibrated one: its curves are fitted to the profile. `key` names an op as the
    profile does (`costmodel.ops.keys.op_key`). Times are of the op alone: what autocast casts
    before it comes on top.
    """

    def __init__(self, profile: Profile, device: DeviceType, key: Callable[[LocalOp], str]) -> None:
        self.ops = profile.ops
        self.device = device
        self.key = key
        self._known: dict[tuple[str, str, int], list[_Known]] = {}
        for record in sorted(profile.ops.values(), key=lambda r: r.key):
            if record.op_class != OpClass.VIEW and record.forward.median_s > 0.0:
                at = record.target, record.dtype, len(record.inputs)
                self._known.setdefault(at, []).append(self._beside(record))
        self._answers: dict[LocalOp, OpTime | None] = {}

    def __call__(self, op: LocalOp, device: DeviceType) -> OpTime | None:
        """None for ops of other devices, views, and targets of which nothing was measured."""
        if device.name != self.device.name or op.op_class is OpClass.VIEW:
            return None
        if op not in self._answers:
            self._answers[op] = self._time(op)
        return self._answers[op]

    def _beside(self, record: OpRecord) -> _Known:
        seconds = self._forward_s(kernel_s(record_work(record, self.device.kind), self.device))
        return _Known(record, log(seconds), log(record.forward.median_s / seconds))

    def _forward_s(self, kernel: float) -> float:
        """What a forward should be measured to take: on a CPU with its dispatch."""
        return max(1e-12, kernel + self.device.overhead_s * (self.device.kind == "cpu"))

    def _time(self, op: LocalOp) -> OpTime | None:
        record = self.ops.get(self.key(op))
        if record is not None:
            time = OpTime(record.forward.median_s, *self._backward(op, record), "measured",
                          max(_LEAST_BAND, record.forward.spread))  # fmt: skip
            return with_dispatch(op, self.device, time)
        known = self._known.get((op.target, op.dtype, len(op.inputs)))
        return self._estimated(op, known) if known else None

    def _backward(self, op: LocalOp, record: OpRecord) -> tuple[float, float]:
        """The parts of a measured backward; as the formula has them where not measured apart."""
        if not op.differentiable or record.backward is None:
            return 0.0, 0.0
        whole = record.backward.median_s
        if record.backward_input and record.backward_weight:
            parts = record.backward_input.median_s, record.backward_weight.median_s
        else:
            says = formula(op, self.device)
            parts = says.backward_input_s, says.backward_weight_s
        total = sum(parts)
        return (whole * parts[0] / total, whole * parts[1] / total) if total else (whole, 0.0)

    def _estimated(self, op: LocalOp, known: Sequence[_Known]) -> OpTime:
        says = formula(op, self.device)
        size = log(
            self._forward_s(kernel_s(forward_work(as_attended(op, self.device.kind)), self.device))
        )
        near = _neighbours(size, known)
        distance = abs(near[0].size - size)
        beyond = size > max(k.size for k in known) or size < min(k.size for k in known)
        inside = distance <= _NEAR or not beyond
        if inside:
            error, band = _between(size, near), _band(size, near)
            forward = _bounded(op, exp(size + error), known)
        else:
            forward, band = exp(size), max(says.band, _band(size, near))
        inputs, weights = self._by_ratio(op, forward, says, near if inside else known)
        return replace(says, forward_s=forward, backward_input_s=inputs, backward_weight_s=weights,
                       source="interpolated" if inside else "fitted", band=band)  # fmt: skip

    def _by_ratio(
        self, op: LocalOp, forward_s: float, says: OpTime, known: Sequence[_Known]
    ) -> tuple[float, float]:
        """A backward as long, relative to its forward, as those that were measured.

        They may have had gradients that this op lacks: of a product each costs the formula's share.
        """
        ratios = [
            k.record.backward.median_s / k.record.forward.median_s
            for k in known
            if k.record.backward is not None
        ]
        backward = says.backward_input_s + says.backward_weight_s
        if not ratios or not backward:
            scale = forward_s / max(says.forward_s, 1e-12)
            return says.backward_input_s * scale, says.backward_weight_s * scale
        whole = backward
        if op.op_class in COMPUTE:
            every = tuple(i._replace(requires_grad=True) for i in op.inputs)
            full = formula(op._replace(inputs=every), self.device)
            whole = full.backward_input_s + full.backward_weight_s
        seconds = median(ratios) * forward_s / whole
        return seconds * says.backward_input_s, seconds * says.backward_weight_s


def _neighbours(size: float, known: Sequence[_Known]) -> list[_Known]:
    """The nearest, and the nearest on its other side or else the next."""
    order = sorted(known, key=lambda k: (abs(k.size - size), k.record.key))
    across = [k for k in order[1:] if (k.size - size) * (order[0].size - size) <= 0.0]
    return [order[0], *(across or order[1:])[:1]]


def _between(size: float, near: Sequence[_Known]) -> float:
    """The error at a size, linear in the logarithm between two measured ones."""
    if len(near) == 1 or near[0].size == near[1].size:
        return sum(k.error for k in near) / len(near)
    first, second = near
    part = (size - first.size) / (second.size - first.size)
    return first.error + min(1.0, max(0.0, part)) * (second.error - first.error)


def _band(size: float, near: Sequence[_Known]) -> float:
    """Wider far from what was measured, and where neighbours disagree about the formula."""
    spread = max(k.record.forward.spread for k in near)
    disagree = abs(near[0].error - near[-1].error) / 2
    octaves = abs(near[0].size - size) / log(2.0)
    return max(_LEAST_BAND, spread) + _INTERPOLATED_BAND + _BAND_PER_OCTAVE * octaves + disagree


def _bounded(op: LocalOp, seconds: float, known: Sequence[_Known]) -> float:
    """No longer than ops that are larger in every dim, no shorter than smaller ones."""
    shapes = [i.shape for i in op.inputs]
    low = [k.record.forward.median_s for k in known if _within(k.record.inputs, shapes)]
    high = [k.record.forward.median_s for k in known if _within(shapes, k.record.inputs)]
    top = max(min(high, default=seconds), max(low, default=0.0))
    return min(max(seconds, max(low, default=0.0)), top) if high else max([seconds, *low])


def _within(small: Sequence[tuple[int, ...]], large: Sequence[tuple[int, ...]]) -> bool:
    return all(
        len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))
        for a, b in zip(small, large, strict=True)
    )
