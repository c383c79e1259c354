"""Operators of our own, with reference implementations that autograd sees through.

`torch.ops.meshwright.*` exist once this module is imported.
"""

import torch
from torch.nn import functional as F

from meshwright.ir.torch_private import operator_library

LIBRARY = operator_library("meshwright")

LIBRARY.define(
    "cross_entropy_sum(Tensor logits, Tensor target, Tensor? weight=None, int ignore_index=-100,"
    " float label_smoothing=0.0) -> Tensor"
)
LIBRARY.define(
    "count_valid(Tensor target, Tensor? weight, int ignore_index, ScalarType dtype) -> Tensor"
)


def cross_entropy_sum(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum of the cross-entropies of logits [N, C, ...] against classes [N, ...]."""
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="sum",
        label_smoothing=label_smoothing,
    )  # fmt: skip


def count_valid(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean cross-entropy divides by: the number of targets, or the sum of their weights."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    # An ignored target may lie outside the classes, so it looks up class 0 and is masked.
    return (weight[torch.where(valid, target, 0)] * valid).sum().to(dtype)


LIBRARY.impl("cross_entropy_sum", cross_entropy_sum, "CompositeImplicitAutograd")
LIBRARY.impl("count_valid", count_valid, "CompositeImplicitAutograd")

CROSS_ENTROPY_SUM = torch.ops.meshwright.cross_entropy_sum.default
COUNT_VALID = torch.ops.meshwright.count_valid.default
