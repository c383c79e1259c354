"""The traced training step as data: tensors, ops and blocks.

Shapes are global: the whole global batch, the whole model. Nothing here needs torch, so a Graph can
also come from a file of layer profiles.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod

from meshwright.ir.graph.routing import Routing
from meshwright.ir.trace.hints import Hint


class Kind(StrEnum):
    """What a tensor is to the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    ACTIVATION = "activation"


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
MAX_BATCH = 2**40
MAX_ELEMENTS = 2**36
"""Of one input, at the global batch size."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value of the graph. `fqn` is the first module path of a parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    fqn: str = ""
    requires_grad: bool = False
    value: tuple[int | float | bool, ...] = ()
    """The flat elements of a small CONSTANT that the model made while running."""
    channels_last: bool = False
    """Inputs and activations: images with their channels innermost (`torch.channels_last`)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of an op, by tensor name."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


Arg = Ref | int | float | complex | bool | str | None | tuple["Arg", ...]
"""An argument: tensors as Ref, dtypes as their name ("float32"), everything else as itself.
Lists are tuples; device, layout and memory-format arguments are dropped (None)."""


@dataclass(frozen=True, slots=True)
class Op:
    """One call. `args` holds every schema argument by name, defaults filled in, in schema order."""

    name: str
    """Unique in the graph."""
    key: str
    """Unique in its block and equal in all blocks of a pattern: `attn.c_attn/addmm`, `/add#2`."""
    target: str
    """`aten.linear.default`, `meshwright.experts.default`, `operator.getitem` never appears: ops
    with several results list them all in `outputs`."""
    args: tuple[tuple[str, Arg], ...]
    inputs: tuple[str, ...]
    """Names of the tensor arguments, in order of appearance in `args`, repeats kept."""
    outputs: tuple[str, ...]
    """An output that is not a tensor (None) is the empty string."""
    module_path: str
    flops: int = 0
    """Forward floating-point operations, multiply-add = 2."""
    saved: tuple[str, ...] = ()
    """Names of tensors that autograd keeps for this op's backward (its inputs or outputs)."""
    saved_extra_bytes: int = 0
    """Bytes that autograd keeps besides `saved` (dropout masks, softmax statistics, indices)."""
    source: str = ""
    """`file:line` of the user's code."""
    routing: Routing | None = None
    """Of a layer of experts: where its tokens go."""

    def arg(self, name: str) -> Arg:
        """The argument called `name` in the op's schema."""
        for key, value in self.args:
            if key == name:
                return value
        raise KeyError(f"{self.target} has no argument {name!r}")


@dataclass(frozen=True, slots=True)
class Block:
    """A run of ops that is planned and emitted as one; blocks of one `signature` are equal."""

    name: str
    """`transformer.h.3`; unique."""
    pattern: str
    """`transformer.h.*`: shared by the blocks of one signature, distinct between signatures."""
    signature: str
    start: int
    stop: int
    """Ops `graph.ops[start:stop]`."""
    inputs: tuple[str, ...]
    """Values from other blocks or the prelude, and graph inputs, in a fixed structural order."""
    outputs: tuple[str, ...]
    """Values that later blocks or the loss need, in a fixed structural order."""
    params: tuple[str, ...]
    """Names of the parameter, buffer and constant tensors it reads, in a fixed structural order.

    Equal blocks list corresponding tensors at the same places of inputs, outputs and params.
    """


@dataclass(frozen=True, slots=True)
class Missed:
    """Places that looked right for a kernel and were not."""

    where: str
    why: str
    places: int
    declined: bool = False
    """Only its price stood against the kernel: it was left out at all places of this name."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """A kernel that stands for runs of operators."""

    kernel: str
    places: int
    """In the model; 0 if its pattern is nowhere."""
    missed: tuple[Missed, ...] = ()
    priced: bool = False
    """Whether it is only put in where the cost model says that it is worth it."""


@dataclass(frozen=True)
class Graph:
    """A training-mode forward with its loss.

    `ops[:prelude]` depend on no parameter (masks, positions, token counts): they belong to no
    block, and each stage runs the ones it needs. `blocks` cover `ops[prelude:]` in order.
    """

    tensors: dict[str, Tensor]
    ops: tuple[Op, ...]
    prelude: int
    blocks: tuple[Block, ...]
    inputs: tuple[str, ...]
    """Names of the INPUT tensors; `input_names` are the model's keyword names for them."""
    input_names: tuple[str, ...]
    loss: str
    """The scalar output."""
    batch_size: int
    """Global batch: size of dim 0 of the `batch_inputs`."""
    batch_inputs: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of module paths that name the same parameter; the first is `Tensor.fqn`."""
    fingerprint: str = ""
    """Hash of structure, parameter names, shapes and dtypes."""
    precision: str = ""
    """The file of `ir/precision` in whose copies of parameters it is traced; empty: parameters have
    the dtypes of the model's."""
    no_autocast: str = ""
    """Where the model turns torch.autocast off, `file:line`; empty: nowhere. Nothing of it is left
    in `ops`, so no plan may cast by torch.autocast."""
    fusions: tuple[Fusion, ...] = ()
    """Kernels that were put in, one for each that was asked for."""
    hints: tuple[Hint, ...] = ()
    """What annotations in the model's code ask for; not part of the fingerprint."""
    meta: dict[str, str] = field(default_factory=dict)
    """For people: model class, torch version, trace time."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.kind is Kind.PARAMETER)

    @cached_property
    def parameter_bytes(self) -> int:
        """Of all parameters."""
        return sum([tensor.nbytes for tensor in self.parameters])

    @cached_property
    def producer(self) -> dict[str, Op]:
        """The op that makes each activation."""
        return {out: op for op in self.ops for out in op.outputs if out}

    @cached_property
    def users(self) -> dict[str, tuple[Op, ...]]:
        """The ops that read each tensor."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                found.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    def block_ops(self, block: Block) -> tuple[Op, ...]:
        return self.ops[block.start : block.stop]

    @property
    def prelude_ops(self) -> tuple[Op, ...]:
        return self.ops[: self.prelude]

    @cached_property
    def block_flops(self) -> tuple[float, ...]:
        """Of the forward of each block."""
        return tuple([sum([op.flops for op in self.block_ops(block)]) for block in self.blocks])

    @cached_property
    def targets(self) -> frozenset[str]:
        """Of all ops: most of what is looked for is nowhere in a graph."""
        return frozenset([op.target for op in self.ops])

    @cached_property
    def flops(self) -> float:
        """Of the whole forward."""
        return sum([op.flops for op in self.ops])

    @cached_property
    def pattern_counts(self) -> Counter[str]:
        """How many blocks each pattern has."""
        return Counter(block.pattern for block in self.blocks)

    def distinct_blocks(self) -> Iterator[Block]:
        """The first block of each pattern."""
        seen: set[str] = set()
        for block in self.blocks:
            if block.pattern not in seen:
                seen.add(block.pattern)
                yield block
