"""Buffers that forward assigns anew (`self.average = ...`): traced as writes to them.

An export follows such an assignment only on its outermost module, which is ours; elsewhere the new
value would be lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook


@contextmanager
def assigned_buffers() -> Iterator[None]:
    """Within it, a new value of a buffer is copied into the old one."""
    register: Any = register_module_buffer_registration_hook
    hook = register(_written)
    try:
        yield
    finally:
        hook.remove()


def _written(module: nn.Module, name: str, new: Tensor | None) -> Tensor | None:
    old = module._buffers.get(name)
    if old is None or new is None or old is new or old.shape != new.shape:
        return None
    with torch.no_grad():
        return old.copy_(new)
