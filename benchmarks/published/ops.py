"""Builds the local ops of a layer: shapes, FLOPs and bytes of one rank and one micro-batch."""

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive

Phase = Literal["forward", "backward"]
Under = Literal["nothing", "forward share", "input", "input share", "weight", "chunks", "tuned"]
"""Chunks: message and product are cut into as many parts as the group has ranks; tuned: so, or
not at all, whichever takes less."""


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that belongs to an op, and what of that op may hide it."""

    primitive: Primitive
    nbytes: float
    """The whole value, as if replicated."""
    axis: Literal["tp", "cp", "ep"]
    phase: Phase
    under: Under = "nothing"
    hidden: float = 1.0
    """Share of what runs at the same time that really hides it."""
    check_s: float = 0.0
    """The CPU's, beyond dispatch."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One op of a layer, what autograd keeps for it, and its collectives."""

    name: str
    op: LocalOp
    saved_bytes: int = 0
    messages: tuple[Message, ...] = ()
    core: bool = False
    """Part of the attention core, which selective recompute runs again."""
    slowdown: float = 1.0
    """Of its kernels over the cost model's."""
    current: bool = False
    """It runs on the libraries that the presets were measured with."""
    core_bytes: int = 0
    """Of `saved_bytes`, what is dropped when the core is recomputed."""
    weight_dtype: str = ""
    """In which the product that makes the weight's gradient runs, if not in the op's."""

    def sending(self, *messages: Message | None) -> "Piece":
        return replace(self, messages=self.messages + tuple(m for m in messages if m))


def linear(
    name: str, rows: int, inner: int, outer: int, dtype: str, *, saved: bool = True, width: int = 2
) -> Piece:
    """rows x inner times a parameter of inner x outer; keeps its input."""
    x = LocalInput((rows, inner), rows * inner * width, True, False)
    weight = LocalInput((outer, inner), inner * outer * width, True, True)
    op = LocalOp("aten.linear.default", OpClass.MATMUL, dtype, 2.0 * rows * inner * outer,
                 (x, weight), ((rows, outer),), rows * outer * width, True)  # fmt: skip
    return Piece(name, op, rows * inner * width if saved else 0)


def grouped(name: str, groups: int, rows: int, inner: int, outer: int, dtype: str) -> Piece:
    """rows x inner of each of `groups` times a parameter of its own; keeps its input."""
    x = LocalInput((groups, rows, inner), 2 * groups * rows * inner, True, False)
    weight = LocalInput((groups, inner, outer), 2 * groups * inner * outer, True, True)
    op = LocalOp("aten.bmm.default", OpClass.MATMUL, dtype, 2.0 * groups * rows * inner * outer,
                 (x, weight), ((groups, rows, outer),), 2 * groups * rows * outer,
                 True)  # fmt: skip
    return Piece(name, op, x.nbytes)


def batched(
    name: str, batch: int, rows: int, inner: int, outer: int, dtype: str, saved_bytes: int,
    core_bytes: int = 0,
) -> Piece:  # fmt: skip
    """A matrix product of two activations."""
    left = LocalInput((batch, rows, inner), 2 * batch * rows * inner, True, False)
    right = LocalInput((batch, inner, outer), 2 * batch * inner * outer, True, False)
    op = LocalOp("aten.bmm.default", OpClass.MATMUL, dtype, 2.0 * batch * rows * inner * outer,
                 (left, right), ((batch, rows, outer),), 2 * batch * rows * outer,
                 True)  # fmt: skip
    return Piece(name, op, saved_bytes, core=True, core_bytes=core_bytes)


def flash(
    name: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int,
    dtype: str, saved_bytes: int,
) -> Piece:  # fmt: skip
    """Causal flash attention; its FLOPs count in full, the kernel skips half."""
    flops = 4.0 * batch * heads * queries * keys * dim
    q = LocalInput((batch, heads, queries, dim), 2 * batch * heads * queries * dim, True, False)
    kv_bytes = 2 * batch * kv_heads * keys * dim
    kv = LocalInput((batch, kv_heads, keys, dim), kv_bytes, True, False)
    op = LocalOp("aten.scaled_dot_product_attention.default", OpClass.ATTENTION, dtype, flops,
                 (q, kv, kv), ((batch, heads, queries, dim),), q.nbytes, True,
                 causal=True)  # fmt: skip
    return Piece(name, op, saved_bytes, core=True)


def pointwise(
    name: str, elements: int, forward: float, backward: float, *, saved_bytes: int = 0,
    op_class: OpClass = OpClass.ELEMENTWISE, core: bool = False,
) -> Piece:  # fmt: skip
    """Memory-bound work on `elements` values: bytes per value read and written each way."""
    read = LocalInput((elements,), round(elements * forward), False, False)
    made = LocalInput((elements,), 0, True, False)
    op = LocalOp("aten.mul.Tensor", op_class, "float32", 0.0, (read, made), ((elements,),), 0,
                 backward > 0, saved_bytes=round(elements * backward))  # fmt: skip
    return Piece(name, op, saved_bytes, core=core, core_bytes=saved_bytes if core else 0)


def lookup(name: str, rows: int, width: int, table_rows: int) -> Piece:
    """Embedding rows."""
    ids = LocalInput((rows,), 8 * rows, False, False)
    table = LocalInput((table_rows, width), 2 * table_rows * width, True, True)
    op = LocalOp("aten.embedding.default", OpClass.GATHER, "float32", 0.0, (ids, table),
                 ((rows, width),), 2 * rows * width, True)  # fmt: skip
    return Piece(name, op, 8 * rows)
