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

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.explain import user_line_here


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
    if old is None or new is None or old is new:
        return None
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        where, line = user_line_here()
        told = [f"{tuple(x.shape)} of {x.dtype}" for x in (old, new)]
        raise TraceError(
            f"{where}: `{line}` makes buffer {name} of {type(module).__name__} {told[1]}, it was "
            f"{told[0]}: a buffer keeps its shape and dtype while a plan runs; give it its final "
            "size, and write to parts of it"
        )
    with torch.no_grad():
        return old.copy_(new)
