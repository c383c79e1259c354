"""Adam (Kingma and Ba 2015): two moments, each as large as its parameter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.updates import Group, KernelStep, State, Update


def begin(p: Tensor, state: State, group: Group) -> float:
    """Steps so far: those that had no gradient in a step are behind the others."""
    if not state:
        state["step"] = torch.zeros((), device="cpu")  # read by the host, which then need not wait
        for name in STEP.buffers:
            state[name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
    return float(state["step"])


def settings(done: float, states: Sequence[State], group: Group) -> dict[str, Any]:
    """Of the step after `done` others."""
    for state in states:
        state["step"] += 1
    return {
        "step": int(done) + 1, "lr": float(group["lr"]), "betas": group["betas"],
        "eps": group["eps"], "decay": group["weight_decay"],
        "decoupled": bool(group.get("decoupled_weight_decay")),
        "sign": -1.0 if group["maximize"] else 1.0,
    }  # fmt: skip


STEP = KernelStep(kernel="adam", buffers=("exp_avg", "exp_avg_sq"), begin=begin, settings=settings)
UPDATE = Update(
    kind=torch.optim.Adam,
    copies=2,
    passes=7,  # reads parameter, gradient and two states, writes all but the gradient
    step=STEP,
    elsewhere={"deepspeed": "Adam"},
)
