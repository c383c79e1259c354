"""The batch that a check takes its step on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.ir.plan.plan import Plan


def batch_of(plan: Plan, given: Mapping[str, Tensor] | None, *, seed: int = 0) -> dict[str, Tensor]:
    """A global batch of the plan's shapes by input name, equal on all ranks.

    It is made of the user's samples where there are some; those that are used again are shifted, as
    equal samples would hide which of them a rank has. Else it is random, integers below 2, which
    are legal almost everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for spec in plan.model.inputs:
        example = None if given is None else given.get(spec.name)
        dtype = getattr(torch, spec.dtype)
        if example is not None and not example.is_meta and example.dtype == dtype:
            found[spec.name] = _stretched(example.detach().cpu(), spec.shape)
        elif dtype.is_floating_point or dtype.is_complex:
            found[spec.name] = torch.randn(spec.shape, generator=generator, dtype=dtype)
        else:
            found[spec.name] = torch.randint(0, 2, spec.shape, generator=generator).to(dtype)
    return found


def _stretched(example: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(example.shape) == shape or not example.ndim or not len(example):
        return example
    rows = []
    for number in range(shape[0]):
        turn, index = divmod(number, len(example))
        rows.append(example[index].roll(turn, -1) if example.ndim > 1 else example[index])
    return torch.stack(rows)


def first_samples(batch: Mapping[str, Tensor], count: int, batch_size: int) -> dict[str, Tensor]:
    """Some of the samples of a batch."""
    return {name: x[:count] if x.shape[:1] == (batch_size,) else x for name, x in batch.items()}
