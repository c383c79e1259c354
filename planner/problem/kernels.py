"""Which fused kernels a search puts in: those that the cost model says are worth it."""

from collections.abc import Mapping, Sequence

from meshwright.costmodel.ops.compute import KeptTimes, kept_inside_bytes
from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import class_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import COMPUTE, DeviceType, OpClass
from meshwright.ir.graph.graph import Kind, Op, Tensor
from meshwright.ir.kernels import KERNELS, check_kernels
from meshwright.ir.styles import style
from meshwright.ir.trace.fuse import Wins

NONE, TORCH, ALL, AUTO = "none", "torch", "all", "auto"
SHORT = 0.1
"""Of a device's memory: what a batch would keep there beside all else, if that is worth time."""
DRAWS_AGAIN = style("").memory.draws_again
TORCHS_OWN = ("gelu",)
"""What they put in is an operator of torch itself, which every device has a kernel for."""


def asked_kernels(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names of kernels from `none`, `torch`, `all`, `auto` or a list; PlanError for an unknown one.

    `torch` has those that are torch's own operators, `auto` all: their price decides."""
    if isinstance(given, str):
        given = {NONE: (), TORCH: TORCHS_OWN, ALL: KERNELS, AUTO: KERNELS}.get(
            given, tuple(given.split(","))
        )
    return check_kernels(tuple(name.strip() for name in given))


def kernels_for(
    clusters: Sequence[Cluster], given: str | Sequence[str] | None = None, stack: str = ""
) -> tuple[tuple[str, ...], Wins | None]:
    """What `trace` takes as `kernels` and `wins` of a model that is meant for these clusters: the
    kernels that are asked for or, where nothing is said (None), those that the stack has; ours has
    those that the cost model says are worth it. PlanError for an unknown one."""
    asked = style(stack).kernels if given is None else given
    return asked_kernels(asked), worth(clusters) if asked == AUTO else None


def worth(clusters: Sequence[Cluster]) -> Wins:
    """Compares the times of a fused op and of what it replaces on the clusters' devices, for the
    whole batch on one of them: both shrink alike where work is shared. One that takes longer is put
    in all the same where memory is short: what it need not keep of the batch would be a large part
    of a device's, were it shared by all devices of the smallest cluster."""
    devices = tuple({d.name: d for c in clusters for d in c.device_types}.values())
    ranks = min((c.num_devices for c in clusters), default=1)

    timer = KeptTimes(None)

    def seconds(op: LocalOp, device: DeviceType) -> float:
        time = timer(op, device)
        return time.total_s + time.forward_dispatch_s + time.input_dispatch_s

    def wins(before: Sequence[Op], after: Sequence[Op], tensors: Mapping[str, Tensor]) -> str:
        for device in devices:
            old, new = (
                sum(
                    seconds(local, device) + _bias_s(local, device)
                    for local in (whole_op(op, tensors, device) for op in ops)
                )
                for ops in (before, after)
            )
            freed = _kept_bytes(before, tensors, device) - _kept_bytes(after, tensors, device)
            if new >= old and freed < SHORT * ranks * device.memory_bytes:
                return f"it would take {new / old:.2f} times as long on {device.name}"
        return ""

    return wins


def _kept_bytes(ops: Sequence[Op], tensors: Mapping[str, Tensor], device: DeviceType) -> int:
    """What ops keep for the backward of what they make themselves."""
    made = {name for op in ops for name in op.outputs}
    kept = {name for op in ops for name in op.saved} & made
    inside = sum(kept_inside_bytes(op, tensors, device, DRAWS_AGAIN) for op in ops)
    return sum(tensors[name].nbytes for name in kept) + inside


def _bias_s(op: LocalOp, device: DeviceType) -> float:
    """The pass over a product's gradient that sums its bias's: the price of products has it in what
    their backward was fitted to, so it does not show there that one lacks it."""
    biases = [i for i in op.inputs if i.is_param and i.requires_grad and len(i.shape) == 1]
    if op.op_class not in COMPUTE or not biases:
        return 0.0
    return kernel_s(KernelWork(OpClass.REDUCTION, op.dtype, 0.0, op.output_bytes), device)


def whole_op(op: Op, tensors: Mapping[str, Tensor], device: DeviceType) -> LocalOp:
    """The whole op as one rank would have it, in the dtypes of the trace."""
    inputs = [tensors[name] for name in op.inputs]
    outputs = [tensors[name] for name in op.outputs if name]
    saved = sum(tensors[name].nbytes for name in op.saved) + kept_inside_bytes(
        op, tensors, device, DRAWS_AGAIN
    )
    return LocalOp(
        op.target, class_of(op), outputs[0].dtype, op.flops,
        tuple(
            LocalInput(
                t.shape, t.nbytes, t.requires_grad, t.kind is Kind.PARAMETER,
                channels_last=t.channels_last,
            )
            for t in inputs
        ),
        tuple(t.shape for t in outputs), sum(t.nbytes for t in outputs),
        any(t.requires_grad for t in inputs), saved,
        channels_last=any(t.channels_last for t in outputs),
    )  # fmt: skip
