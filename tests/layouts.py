"""Sees in which layout convolutions run."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ir.graph.images import is_channels_last


class Layouts(TorchDispatchMode):
    """Notes of each convolution whether its image and its result have their channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.seen.append((is_channels_last(args[0]), is_channels_last(result)))
        return result
