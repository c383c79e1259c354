"""Stochastic gradient descent, without momentum: no state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.updates import Group, KernelStep, State, Update

BUFFER = "momentum_buffer"


def begin(p: Tensor, state: State, group: Group) -> bool:
    """Whether it is the first step, before which the buffer is all zeros."""
    first = state.get(BUFFER) is None
    if first and group["momentum"]:
        state[BUFFER] = torch.zeros_like(p, memory_format=torch.contiguous_format)
    return first


def settings(first: bool, states: Sequence[State], group: Group) -> dict[str, Any]:
    """`first`: dampening begins with the second step."""
    return {
        "first": first, "lr": float(group["lr"]),
        "momentum": group["momentum"], "dampening": group["dampening"],
        "decay": group["weight_decay"], "nesterov": group["nesterov"],
        "sign": -1.0 if group["maximize"] else 1.0,
    }  # fmt: skip


def rests(group: Group) -> bool:
    """Momentum goes on, and weights decay, without a gradient."""
    return not group["momentum"] and not group["weight_decay"]


STEP = KernelStep(kernel="sgd", buffers=(BUFFER,), begin=begin, settings=settings)
UPDATE = Update(kind=torch.optim.SGD, copies=0, passes=3, rests=rests, step=STEP)
