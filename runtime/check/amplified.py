"""Whether a model makes rounding large: plain PyTorch beside itself, its weights moved by one unit.

Where that differs as much as a job does, the job's rounding may be all that differs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.runtime.check.difference import StepOutcome, TensorDifference, first_difference

_TRIES = 3
"""Draws of which way each weight is moved; a choice between near values does not flip in each."""


def amplified(
    model: nn.Module, step: Callable[[], StepOutcome], rounding: float
) -> TensorDifference | None:
    """Returns the first tensor of a step of plain PyTorch that moves by more than `rounding`
    (relative) explains, when each parameter of `model` moves by one unit of rounding; None if none
    does. `step` takes a step of `model` as it is, and leaves it so. Parameters are put back."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = step()
    try:
        for seed in range(_TRIES):
            _set(model, {name: _moved(name, x, seed) for name, x in before.items()})
            if found := first_difference(step(), wanted, rounding):
                return found
        return None
    finally:
        _set(model, before)


def told(found: TensorDifference) -> str:
    """Says what it means that a model does this, and what to do."""
    return (
        "Plain PyTorch differs from itself as well where its weights are moved by one unit of "
        f"rounding ({found}): the model makes rounding large, as large terms that cancel, choices "
        "between nearly equal values and divisions by nearly zero do. So this step does not show "
        "whether the job is right. Check it with trained weights, or in float64 if it is not "
        "(model.double(), search with --precision fp64); to train without this check, pass "
        "check=False"
    )


def _set(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def _moved(name: str, value: Tensor, seed: int) -> Tensor:
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + seed)
    signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
    return value * (1 + torch.finfo(value.dtype).eps * signs)
