"""Time of one op on one device: measured if a timer knows it, otherwise by its class's curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol, get_args

from meshwright.costmodel.ops.formulas import (
    SOURCE_BAND,
    KernelWork,
    curve_of,
    kernel_s,
    memory_s,
)
from meshwright.costmodel.ops.kernel_work import (
    accumulate_bytes,
    as_attended,
    forward_work,
    input_work,
    wanted_inputs,
    wanted_weights,
    weight_work,
)
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.costmodel.ops.made_of import calls_of
from meshwright.costmodel.ops.scaled import AS_IT_IS, as_multiplied, is_scaled, scaling_s
from meshwright.ir.cluster.device import DeviceType, OpClass, Source
from meshwright.ir.graph.graph import DTYPE_BYTES, Op, Tensor
from meshwright.ir.graph.op_facts import InnerPass
from meshwright.ir.layout.op_messages import Passes
from meshwright.ir.ops import facts

_VIEW_OVERHEAD = 0.4
"""Share of an op's dispatch that an op without a kernel costs; assumption."""
_PYTHON_CALLS = 6.0
"""Dispatches that a fused operator takes each way on a CPU, with those of torch's operators inside:
60 to 115 us forward and backward of 16 rows of 64, where a product of two such takes 16."""
_WIDENED = 2.4
"""Times the passes of a fused operator on narrow values on a CPU: values in between have twice the
bytes, and casts come to it; 1.2 times float32's time was measured, of half the bytes."""
TIMED: frozenset[Source] = frozenset({"measured", "interpolated"})
"""Sources of times of whole ops, not of curves."""
_SOURCES: tuple[Source, ...] = get_args(Source)


def kept_inside_bytes(
    op: Op, tensors: Mapping[str, Tensor], device: DeviceType, draws_again: bool
) -> int:
    """Bytes that autograd keeps on such a device beside the op's operands and results, for all of
    the batch; `draws_again`: kernels of the stack keep no random numbers."""
    if device.kind == "cpu" or not op.saved_extra_bytes:
        return op.saved_extra_bytes
    known = facts(op.target)
    if known.redrawn and draws_again:
        return 0
    kept = known.kernel_keeps and known.kernel_keeps([tensors[n].shape for n in op.inputs])
    return op.saved_extra_bytes if kept is None else kept


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one op; the backward split into gradients of activations and of parameters.

    On a GPU these are the kernels' times and dispatch is told apart: the CPU runs ahead, so that
    a run of ops takes the longer of both sums. On a CPU dispatch is part of the times.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    source: Source
    band: float
    """Relative error to expect."""
    forward_dispatch_s: float = 0.0
    input_dispatch_s: float = 0.0
    weight_dispatch_s: float = 0.0

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
    """The timer's answer, otherwise the formula's; and the casts that autocast puts before it."""
    time = (timer(op, device) if timer else None) or formula(op, device)
    if not any([operand.cast_bytes for operand in op.inputs]):
        return time
    return _with_casts(op, device, time)


@dataclass(slots=True)
class KeptTimes:
    """A timer that asks another one, or the formula, once for each op."""

    timer: OpTimer | None
    known: dict[tuple[LocalOp, str], OpTime] = field(default_factory=dict)

    def __call__(self, op: LocalOp, device: DeviceType) -> OpTime:
        key = op, device.name
        found = self.known.get(key)
        if found is None:
            said = self.timer(op, device) if self.timer else None
            found = self.known[key] = said or formula(op, device)
        return found


def formula(op: LocalOp, device: DeviceType) -> OpTime:
    """Kernels by the class's curve and dispatch by the device's overhead."""
    if op.op_class is OpClass.VIEW:
        back = float(op.differentiable)
        return dispatched(OpTime(0.0, 0.0, 0.0, device.source, SOURCE_BAND[device.source]),
                           device, _VIEW_OVERHEAD, _VIEW_OVERHEAD * back, 0.0)  # fmt: skip
    if several := calls_of(op):
        return _one_after_the_other([formula(call, device) for call in several])
    if op.inner:
        return _in_steps(op, device)
    op = as_multiplied(as_attended(op, device.kind))
    scaled = is_scaled(op) and op.dtype != AS_IT_IS
    forward_s, input_s, own_s = scaling_s(op, device) if scaled else (0.0, 0.0, 0.0)
    curve = curve_of(op.op_class, device)
    weights = wanted_weights(op)
    weight_s = curve.backward * _seconds(weight_work(op), device) + own_s
    if weights:
        adding = curve_of(OpClass.ELEMENTWISE, device)
        weight_s += adding.floor_s * weights + memory_s(accumulate_bytes(op), adding, device)
    passes, times = _by_torch(op) if device.kind == "cpu" else (1.0, 1.0)
    time = OpTime(
        passes * kernel_s(forward_work(op), device) + forward_s,
        passes * curve.backward * _seconds(input_work(op), device) + input_s,
        weight_s,
        curve.source,
        curve.band,
    )
    inputs = wanted_inputs(op)
    back = float(inputs) + (times - 1.0 if inputs else 0.0)
    return dispatched(time, device, times, back, 2.0 * weights)


def _by_torch(op: LocalOp) -> tuple[float, float]:
    """Passes over memory and dispatches, each way, of what has no kernel on a CPU. Fused operators
    are of Python there, which calls torch's one after the other on values as wide as float32."""
    known = facts(op.target)
    if not known.fused:
        return known.torch_passes, 1.0
    read = op.inputs[0]
    narrow = read.nbytes < DTYPE_BYTES["float32"] * prod(read.shape)
    return (_WIDENED if narrow else 1.0) * known.torch_passes, _PYTHON_CALLS


_DIRECT = 0.4
"""Share of an op's dispatch that a call inside of an operator costs on a CPU, with a kernel or
without: nothing but Python's own call, and its gradient by autograd alone."""
_KEPT = 2.5
"""Times as long as a forward's that a backward's bytes take on a CPU: what it makes again is kept
for the gradients of a run of steps, in memory that is not in the cache, and often new.

Steps of RWKV (64 to 1,024 channels), Mamba and KimiLinear took 3.5 us a call forward and back, with
views, of 9 us for an op in a small layer, and 20 GB/s forward, 8 back. A step of RWKV, which is all
calls, was priced at 1.6 times what it took, one of KimiLinear's backward at a third (2-core cloud
machine with others at work, torch 2.13, 2026-11-30)."""


_PAGE_S = 30e-9
"""Of a CPU that comes to a page of memory whose address it does not know: rows of 16 to 64 channels
of Mamba's states, one for each of 2,048 channels, took 31 to 48 ns longer than whole parts (same
machine, shortest of 16 to 244 turns)."""


def _in_steps(op: LocalOp, device: DeviceType) -> OpTime:
    """Small kernels, each of which waits for the one before; the backward begins with all again."""
    curve, on_cpu = curve_of(OpClass.ELEMENTWISE, device), device.kind == "cpu"
    once, gradients = op.inner
    kept = _KEPT if on_cpu else 1.0

    def dispatches(part: InnerPass) -> float:
        if on_cpu:
            return _DIRECT * (part.kernels + part.views)
        return part.kernels + _VIEW_OVERHEAD * part.views

    def seconds(part: InnerPass, passes: float) -> float:
        looked_up_s = _PAGE_S * part.pages * on_cpu
        moved_s = passes * memory_s(part.nbytes, curve, device)
        return part.kernels * curve.floor_s + moved_s + looked_up_s

    back = float(op.differentiable)
    time = OpTime(
        seconds(once, 1.0), back * (seconds(once, kept) + seconds(gradients, kept)), 0.0,
        curve.source, curve.band,
    )  # fmt: skip
    calls = dispatches(once)
    return dispatched(time, device, calls, back * (calls + dispatches(gradients)), 0.0)


def _one_after_the_other(times: Sequence[OpTime]) -> OpTime:
    """The sum; the backward begins with all but the last again."""
    again = times[:-1]
    return OpTime(
        sum(t.forward_s for t in times),
        sum(t.backward_input_s for t in times) + sum(t.forward_s for t in again),
        sum(t.backward_weight_s for t in times),
        worst_source([t.source for t in times]),
        max(t.band for t in times),
        sum(t.forward_dispatch_s for t in times),
        sum(t.input_dispatch_s for t in times) + sum(t.forward_dispatch_s for t in again),
        sum(t.weight_dispatch_s for t in times),
    )


def with_dispatch(op: LocalOp, device: DeviceType, kernels: OpTime) -> OpTime:
    """Measured times of kernels on a GPU, with the CPU's part of the op beside them."""
    if device.kind == "cpu":
        return kernels
    return dispatched(kernels, device, 1.0, float(wanted_inputs(op)), 2.0 * wanted_weights(op))


def gradient_sum(nbytes: int, device: DeviceType) -> OpTime:
    """Adding the gradient of one more reader of a value to that of the others."""
    curve = curve_of(OpClass.ELEMENTWISE, device)
    seconds = curve.floor_s + memory_s(3 * nbytes, curve, device)
    return dispatched(OpTime(0.0, seconds, 0.0, curve.source, curve.band), device, 0, 1.0, 0)


def moving(passes: Passes, differentiable: bool, device: DeviceType) -> OpTime:
    """What an op that is split moves in memory around its messages."""
    curve, back = curve_of(OpClass.ELEMENTWISE, device), float(differentiable)
    seconds = [
        memory_s(nbytes, curve, device) for nbytes in (passes.forward_bytes, passes.backward_bytes)
    ]
    time = OpTime(seconds[0], seconds[1] * back, 0.0, curve.source, curve.band)
    return dispatched(time, device, passes.forward_calls, passes.backward_calls * back, 0)


def rows_left_out_s(nbytes: int, made: float, device: DeviceType) -> float:
    """Seconds by which a backward is shorter that makes and adds the gradient of a share of a
    table's rows, `made`, instead of all its bytes, by the formula."""
    gather, adding = curve_of(OpClass.GATHER, device), curve_of(OpClass.ELEMENTWISE, device)

    def making_s(part: float) -> float:
        added_s = memory_s(3 * part, adding, device)
        return gather.backward * memory_s(part, gather, device) + added_s

    return making_s(nbytes) - making_s(nbytes * made)


def _seconds(work: KernelWork | None, device: DeviceType) -> float:
    return kernel_s(work, device) if work else 0.0


def dispatched(
    time: OpTime, device: DeviceType, forward: float, inputs: float, weights: float
) -> OpTime:
    """Adds the dispatch of so many ops: to the times on a CPU, beside them on a GPU."""
    each, beside = device.overhead_s, device.kind == "cuda"
    inside = 0.0 if beside else each
    outside = each if beside else 0.0
    # Not by `replace`, which costs more than all the rest.
    return OpTime(
        time.forward_s + inside * forward,
        time.backward_input_s + inside * inputs,
        time.backward_weight_s + inside * weights,
        time.source,
        time.band,
        time.forward_dispatch_s + outside * forward,
        time.input_dispatch_s + outside * inputs,
        time.weight_dispatch_s + outside * weights,
    )


def _with_casts(op: LocalOp, device: DeviceType, time: OpTime) -> OpTime:
    """Casts in forward, and of the gradients back in backward."""
    curve = curve_of(OpClass.COPY, device)
    seconds, counts = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for operand in op.inputs:
        if not operand.cast_bytes:
            continue
        took = curve.floor_s + memory_s(operand.cast_bytes, curve, device)
        back = op.differentiable and operand.requires_grad
        for part in (0, 1 + operand.is_param) if back else (0,):
            seconds[part] += took
            counts[part] += 1
    cast = replace(
        time,
        forward_s=time.forward_s + seconds[0],
        backward_input_s=time.backward_input_s + seconds[1],
        backward_weight_s=time.backward_weight_s + seconds[2],
    )
    return dispatched(cast, device, *counts)
