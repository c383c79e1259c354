"""A copy of a large model with one or two of each kind of its repeated blocks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

KEPT = 2
"""Blocks of a kind: one that follows another of its kind is there."""


@contextmanager
def cut(model: nn.Module) -> Iterator[int]:
    """Inside, lists of equal blocks are short; how many blocks were left out.

    The module is as it was afterwards: what is to stay short is copied inside.
    """
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    left_out = 0
    try:
        for module in list(model.modules()):
            if not isinstance(module, nn.ModuleList | nn.Sequential):
                continue
            kept = _kept(module)
            if len(kept) < len(module):
                before.append((module, dict(module._modules)))
                left_out += len(module) - len(kept)
                module._modules = {str(i): child for i, child in enumerate(kept)}
        yield left_out
    finally:
        for module, children in before:
            module._modules = children


def _kept(module: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    seen: dict[object, int] = {}
    kept = []
    for child in module:
        kind = _kind(child)
        seen[kind] = seen.get(kind, 0) + 1
        # What has no parameters is no block: an activation between two of them.
        if seen[kind] <= KEPT or not any(True for _ in child.parameters()):
            kept.append(child)
    return kept


def _kind(module: nn.Module) -> object:
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in module.state_dict().items())
    return type(module), shapes


def with_values(model: nn.Module) -> nn.Module:
    """A copy from the meta device, with random weights and plain buffers."""
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return model
    made = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in (*made.parameters(), *made.buffers()):
            if x.is_floating_point() and x.ndim > 1:
                x.copy_(torch.randn(x.shape, generator=generator) * 0.02)
            else:
                x.fill_(1 if x.is_floating_point() or x.is_complex() else 0)
    return made
