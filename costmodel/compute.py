"""Time of one op on one device: the roofline, and the interface that measured tables implement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from meshwright.costmodel.op_classes import COMPUTE
from meshwright.ir.device import DeviceType, OpClass, Source

_VIEW_OVERHEAD = 0.4
"""Share of an op's dispatch that an op without a kernel costs; assumption."""
_ATTENTION_BACKWARD = 2.5
"""Flash attention recomputes the scores: 5 matmuls against 2 (Dao 2023, section 3)."""
_SOURCES: tuple[Source, ...] = get_args(Source)
SOURCE_BAND: dict[Source, float] = {
    "measured": 0.05,
    "interpolated": 0.1,
    "fitted": 0.2,
    "datasheet": 0.3,
    "assumption": 0.5,
}
"""Relative error to expect of a time whose source says nothing more exact; assumptions."""


@dataclass(frozen=True, slots=True)
class LocalInput:
    """A tensor operand as one rank holds it."""

    shape: tuple[int, ...]
    nbytes: int
    requires_grad: bool
    is_param: bool


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One op with the shapes of one rank and one micro-batch."""

    target: str
    op_class: OpClass
    dtype: str
    flops: float
    """Forward."""
    inputs: tuple[LocalInput, ...]
    outputs: tuple[tuple[int, ...], ...]
    output_bytes: int
    differentiable: bool


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one op; the backward split into gradients of activations and of parameters."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    source: Source
    band: float
    """Relative error to expect."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_input_s + self.backward_weight_s


class OpTimer(Protocol):
    """What a table of measurements provides; None where it has no answer."""

    def __call__(self, op: LocalOp, device: DeviceType) -> OpTime | None: ...


def worst_source(sources: Sequence[Source]) -> Source:
    """The least certain of several sources."""
    return max(sources, key=_SOURCES.index, default="measured")


def op_time(op: LocalOp, device: DeviceType, timer: OpTimer | None = None) -> OpTime:
    """Measured if the timer knows the op, otherwise the roofline."""
    measured = timer(op, device) if timer else None
    return measured or roofline(op, device)


def roofline(op: LocalOp, device: DeviceType) -> OpTime:
    """Williams et al. 2009: the slower of arithmetic and memory traffic, plus dispatch."""
    bias, band = device.overhead_s, SOURCE_BAND[device.source]
    if op.op_class is OpClass.VIEW:
        bias *= _VIEW_OVERHEAD
        return OpTime(bias, bias * op.differentiable, 0.0, device.source, band)
    read = sum(i.nbytes for i in op.inputs)
    if op.op_class is OpClass.GATHER:
        # Only the rows that are asked for are read.
        read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    forward = _time(op, device, op.flops, read + op.output_bytes) + bias
    if not op.differentiable:
        return OpTime(forward, 0.0, 0.0, device.source, band)
    return OpTime(forward, _input_s(op, device), _weight_s(op, device), device.source, band)


def _time(op: LocalOp, device: DeviceType, flops: float, nbytes: float) -> float:
    compute = op.op_class in COMPUTE
    memory_class = OpClass.COPY if compute else op.op_class
    memory = nbytes / (
        device.memory_bandwidth_bytes_per_s * device.efficiency.get(memory_class, 1.0)
    )
    if not compute:
        return memory
    return max(flops / (device.peak(op.dtype) * device.efficiency.get(op.op_class, 1.0)), memory)


def _input_s(op: LocalOp, device: DeviceType) -> float:
    """Gradients of the activations: read the output's gradient and what was saved, write."""
    wanted = [i for i in op.inputs if i.requires_grad and not i.is_param]
    if not wanted:
        return 0.0
    grads = sum(i.nbytes for i in wanted)
    nbytes = op.output_bytes + sum(i.nbytes for i in op.inputs) + grads
    flops = op.flops
    if op.op_class is OpClass.ATTENTION:
        flops *= _ATTENTION_BACKWARD
    elif not any(i.is_param for i in op.inputs):
        flops *= sum(len(i.shape) > 1 for i in wanted)
    if op.op_class is OpClass.GATHER:
        nbytes = 2 * op.output_bytes + grads
    return _time(op, device, flops, nbytes) + device.overhead_s * len(wanted)


def _weight_s(op: LocalOp, device: DeviceType) -> float:
    """Gradients of the parameters, and adding them to those of earlier micro-batches."""
    wanted = [i for i in op.inputs if i.requires_grad and i.is_param]
    if not wanted:
        return 0.0
    grads = sum(i.nbytes for i in wanted)
    read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    accumulate = 3 * grads / (device.memory_bandwidth_bytes_per_s
                              * device.efficiency.get(OpClass.ELEMENTWISE, 1.0))  # fmt: skip
    flops = op.flops if any(len(i.shape) > 1 for i in wanted) else 0.0
    return _time(op, device, flops, read + grads) + accumulate + 2 * device.overhead_s * len(wanted)
