"""Images that lie in memory with their channels innermost (`torch.channels_last`)."""

import torch
from torch import Tensor


def is_channels_last(x: Tensor) -> bool:
    """Whether images of 2 or 3 dims lie so, and not in both ways (one channel, one position)."""
    return (
        x.ndim in (4, 5)
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=last_format(x.ndim))
    )


def channels_last(x: Tensor) -> Tensor:
    """The images with their channels innermost: themselves if they lie so."""
    return x.contiguous(memory_format=last_format(x.ndim))


def last_format(dims: int) -> torch.memory_format:
    """The layout of images with so many dims, samples and channels among them."""
    return torch.channels_last if dims == 4 else torch.channels_last_3d
