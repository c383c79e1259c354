"""What was measured on a target: times of ops, blocks, collectives and copies, and fixed memory.

A profile is data. `runtime.profiling` measures it, `ir.profile.profile_store` keeps it in one
SQLite file, `costmodel` looks measured values up in it and fits formulas to it for the rest.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from json import dumps
from typing import Literal

COMPILED = "+compiled"
"""How keys of blocks end that torch.compile has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and with what a profile was measured; figures of another machine do not mix with it."""

    device: str
    """Name of the GPU, or of the CPU model."""
    kind: Literal["cuda", "cpu"]
    driver: str
    """CUDA driver version, or the kernel's release."""
    torch: str
    backend: str
    """nccl, gloo."""
    cores: int = 0
    """CPU: cores that the processes share; 0 on GPUs."""
    memory_bytes: int = 0

    def __str__(self) -> str:
        cores = f" ({self.cores} cores)" if self.cores else ""
        return f"{self.device}{cores}, {self.driver}, torch {self.torch}, {self.backend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of repeated calls."""

    median_s: float
    spread: float
    """Half the distance of the 10th and 90th percentile, relative to the median."""
    count: int
    mean_s: float = 0.0
    """0 if it is not known."""

    @property
    def expected_s(self) -> float:
        """What one call of many adds to their sum: the mean, where it is known."""
        return self.mean_s or self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One op at the shapes of one rank."""

    key: str
    """`costmodel.ops.keys.op_key`: target, dtype, local shapes, which inputs have gradients, and
    every other argument that the time depends on."""
    target: str
    op_class: str
    dtype: str
    inputs: tuple[tuple[int, ...], ...]
    flops: float
    moved_bytes: float
    """Operands read and results written in forward."""
    forward: Timing
    backward: Timing | None
    """Gradients of all operands; None if there are none."""
    backward_input: Timing | None = None
    """Gradients of the activations alone."""
    backward_weight: Timing | None = None
    """Gradients of the parameters alone."""
    saved_bytes: int = 0
    causal: bool = False
    """Attention that looks back only."""
    channels_last: bool = False
    """Its results are images whose channels are innermost in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One emitted block with the shapes of one rank and micro-batch; collectives left out."""

    key: str
    """`costmodel.ops.keys.block_key`: the local ops and conversions of the block, the precision,
    and whether it is compiled."""
    pattern: str
    """For people."""
    samples: int
    tp: int
    processes: int
    """Processes that measured at once."""
    forward: Timing
    backward: Timing
    backward_input: Timing | None
    """First half of a split backward; None where the block cannot be split."""
    backward_weight: Timing | None
    no_grad_forward: Timing | None = None
    """The first forward of a recomputed block."""
    accumulate: Timing | None = None
    """What a backward takes more where gradients are there already (later micro-batches)."""
    saved_bytes: int = 0
    """Kept alive between forward and backward, beyond parameters and the block's inputs."""
    workspace_bytes: int = 0
    """Most bytes at once in forward or backward beyond parameters, inputs and what is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A process group as the links see it."""

    size: int
    per_node: int
    """Members on the fullest node."""
    stride: int = 1
    """Distance of neighbours in global ranks; several such groups work at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective or message over one kind of group."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send."""
    nbytes: int
    """The whole value, as if replicated on the group; for send the message."""
    group: GroupShape
    groups_at_once: int
    time: Timing
    loaded: bool = False
    """Measured while every member computes."""
    compute_slowdown: float = 1.0
    """By how much the computation beside it took longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRecord:
    """A copy between host and device memory, or within the device."""

    direction: Literal["to_device", "to_host", "within"]
    nbytes: int
    time: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Memory that no tensor of the plan explains."""

    name: str
    """process, process_group, allocator_rounding, fragmentation..."""
    value: float
    unit: str
    """bytes, or ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """One optimizer step of one rank."""

    optimizer: str
    num_tensors: int
    nbytes: int
    """Of the parameters it updates."""
    time: Timing


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that is known about one machine; looked up by key."""

    machine: Machine
    ops: Mapping[str, OpRecord] = field(default_factory=dict)
    blocks: Mapping[str, BlockRecord] = field(default_factory=dict)
    collectives: tuple[CollectiveRecord, ...] = ()
    copies: tuple[CopyRecord, ...] = ()
    memory: Mapping[str, MemoryRecord] = field(default_factory=dict)
    optimizers: tuple[OptimizerRecord, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything in it."""
        text = dumps(asdict(self), sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:16]
