"""From the host to a device without a wait: what is copied lies in pinned memory, from which the
device reads when its stream gets there. A copy from other memory would first wait for the stream.
"""

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device; the host may change or forget its own at once. Torch keeps
    the pinned memory from being used again before it has been read."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    # Also of what the caller pinned, as he may write to it again. `pin_memory` would keep the gaps
    # of a view such as `ids[:, 1:]`, and torch brings what has gaps by way of other memory.
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)
