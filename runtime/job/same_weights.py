"""Whether all ranks have built their modules with the same values."""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

from meshwright.runtime.job.weights import model_tensors

_VALUES = 64
"""Of each tensor, evenly spaced: other random numbers differ in all of them."""
ADVICE = (
    "every rank must build the same model: call torch.manual_seed before it is built, load weights "
    "on every rank, or build it on the meta device and load a checkpoint"
)


def weights_digest(model: nn.Module) -> str:
    """A digest of some values of every parameter and buffer; those without values count as such."""
    digest = sha256()
    for name, tensor in model_tensors(model).items():
        digest.update(name.encode())
        for part in _sampled(tensor.detach()):
            digest.update(part)
    return digest.hexdigest()


def _sampled(tensor: Tensor) -> Iterator[bytes]:
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return
    if not tensor.is_contiguous():  # by rows: to flatten it would copy it
        tensor = tensor[:: max(1, len(tensor) // _VALUES)]
    flat = tensor.reshape(-1)
    some = flat[:: max(1, flat.numel() // _VALUES)][: 2 * _VALUES]
    yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
