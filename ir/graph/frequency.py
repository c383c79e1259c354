"""Embeddings whose gradients are divided by how often a row is looked up in the whole batch.

PyTorch counts in the indices that it is given, which under data parallelism and micro-batches are a
part of the batch. So the count becomes an op of its own, a sum over the batch, and the look-up a
plain one whose gradient is divided.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.trace.flat_trace import Raw, RawOp, dtype_name, make_op

LIBRARY.define("count_rows(Tensor indices, int rows, ScalarType dtype) -> Tensor")


def count_rows(indices: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """How often each row is looked up."""
    flat = indices.reshape(-1)
    ones = torch.ones(flat.shape, dtype=dtype, device=flat.device)
    return torch.zeros(rows, dtype=dtype, device=flat.device).index_add(0, flat, ones)


LIBRARY.impl("count_rows", count_rows, "CompositeImplicitAutograd")


@custom_op("meshwright::divide_gradient", mutates_args=())
def divide_gradient(found: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    """What was looked up; its gradient is divided by the count of its row."""
    return found.clone()


@divide_gradient.register_fake
def _shape(found: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    return torch.empty_like(found)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    indices, counts = ctx.saved_tensors
    return gradient / counts[indices].clamp(min=1).unsqueeze(-1), None, None


divide_gradient.register_autograd(_backward, setup_context=_setup)

COUNT_ROWS = torch.ops.meshwright.count_rows.default
DIVIDE_GRADIENT = torch.ops.meshwright.divide_gradient.default


def count_frequencies(raw: Raw) -> Raw:
    """Takes apart each embedding that scales gradients by frequency."""
    ops: list[RawOp] = []
    for op in raw.ops:
        by_frequency = op.name == "aten.embedding.default" and op.args["scale_grad_by_freq"]
        ops += _apart(raw, op) if by_frequency else [op]
    raw.ops = ops
    return raw


def _apart(raw: Raw, op: RawOp) -> list[RawOp]:
    weight, indices = op.args["weight"], op.args["indices"]
    assert isinstance(weight, Ref) and isinstance(indices, Ref)
    table, (out,) = raw.fakes[weight.name], op.outputs
    counts, found = raw.fresh("row_counts"), raw.fresh("looked_up")
    raw.fakes[found] = raw.fakes[out]
    raw.fakes[counts] = table.detach().new_empty(table.shape[0])
    rows, kind = table.shape[0], dtype_name(table.dtype)
    count: dict[str, Arg] = {"indices": indices, "rows": rows, "dtype": kind}
    divide: dict[str, Arg] = {"found": Ref(found), "indices": indices, "counts": Ref(counts)}
    return [
        make_op(COUNT_ROWS, count, op, [counts]),
        make_op(op.target, op.args | {"scale_grad_by_freq": False}, op, [found]),
        make_op(DIVIDE_GRADIENT, divide, op, [out]),
    ]
