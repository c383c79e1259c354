"""What the runtime itself costs beside ops and collectives: Python, copies of packed tensors."""

from dataclasses import dataclass

from meshwright.costmodel.ops.formulas import busy_s, curve_of, memory_s
from meshwright.ir.cluster.device import DeviceType, OpClass

# On CPUs, of one process that has a core to itself: medians of benchmarks/overheads.py on a 2-core
# cloud machine, torch 2.13, 2026-11-21 (block 13 to 20 us, action 37 to 42 us, step 56 to 171 us).
# On GPUs Python runs ahead of the device and costs nothing, but for what is once per step.
CPU_ACTION_S = 40e-6
"""An action of the schedule: the executor, its messages, the start of autograd."""
CPU_BLOCK_S = 15e-6
"""A block within an action: its module, its graph's leaves and edges. Measured blocks have it."""
CPU_STEP_S = 1e-3
"""A step: cutting the batch, the loss, bookkeeping, what forms and optimizers look at: steps of 7
to 25 ms of one process took 0.7 to 2.2 ms longer than a plain loop with its blocks and actions
(same machine, 2026-11-26). In steps of next to no work all of it stays in the caches and takes
0.1."""
GPU_STEP_S = 1e-3
"""A step: until the queue is full again; assumption."""
CPU_THIN = 0.1
"""Share of a CPU's rate that products with a matrix of few columns reach: 4 GFLOP/s with 4 columns
and 39 with 16, 512 x 2048 float32 on one core of the same machine, torch 2.13, 2026-11-25."""
CPU_TURNS = 0.05
"""Share by which computing in halves takes longer than its ops: ranks wait for each other at twice
as many collectives, and gradients come in twice as many parts. Steps of benchmarks/overlap.py on a
wire that takes no time took 3 to 6 % longer than with products' own cost, on the same machine."""
CPU_PIECE = 0.5
"""Of an op's dispatch, what it takes to find the place of one rank's piece of one tensor in a flat
one, and to begin to copy it: 5 us where ops took 10 (profile of a transformer of 48 tensors that 4
ranks share, same machine, 2026-11-25)."""
TALKING = 0.5
"""Share of a core that Gloo needs while a process communicates; assumption. Only where processes
outnumber cores, and the link has no measured slowdown of computing."""
CPU_FRAGMENTATION = 0.4
"""Of activations, buffers and workspace: what the C heap, which keeps freed memory (`ir.heap`),
grows beyond them. Resident less tracked bytes of a GPT-2 of 6 layers on one process: 0.41 and 0.6
with 1 and 4 micro-batches, after 40 MB for code and Python. A profile's record replaces it."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Of one device."""

    action_s: float
    block_s: float
    step_s: float
    device: DeviceType

    def work_s(self, moved: float, flops: float, calls: float, *, thin: bool = True) -> float:
        """Seconds of so many kernels that multiply matrices, and read and write so many bytes for
        it. `thin`: one matrix has few columns, and memory limits them, or arithmetic; others take
        what their class takes (`formulas.kernel_s`)."""
        device = self.device
        curve = curve_of(OpClass.MATMUL, device)
        slow = CPU_THIN if thin and device.kind == "cpu" else 1.0
        rate = device.peak("float32") * curve.share * slow
        arithmetic = flops / rate if flops else 0.0
        each = device.overhead_s if device.kind == "cpu" else max(device.overhead_s, curve.floor_s)
        moving = self.copy_s(moved)
        if thin or not flops:
            return max(moving, arithmetic) + calls * each
        return busy_s(arithmetic, moving) + curve.packing * moving + calls * each

    @property
    def piece_s(self) -> float:
        """Seconds beside the copying for a piece of a tensor, where they are packed one by one."""
        return CPU_PIECE * self.device.overhead_s if self.device.kind == "cpu" else 0.0

    def block_of(self, measured: bool) -> float:
        """Seconds of a block beside its own times, which have it if they were measured."""
        return 0.0 if measured else self.block_s

    def copy_s(self, nbytes: float) -> float:
        """Seconds to read and write this many bytes in all."""
        return memory_s(nbytes, curve_of(OpClass.COPY, self.device), self.device) if nbytes else 0.0


def overheads_of(device: DeviceType) -> Overheads:
    if device.kind == "cpu":
        return Overheads(CPU_ACTION_S, CPU_BLOCK_S, CPU_STEP_S, device)
    return Overheads(0.0, 0.0, GPU_STEP_S, device)
