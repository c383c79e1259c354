"""Muon: the momentum of a matrix, made orthogonal by five Newton-Schulz steps (Jordan et al. 2024);
torch's own."""

import torch

from meshwright.forms.updates import Reach, Update

_STEPS = 5


def flops(shape: tuple[int, ...]) -> float:
    """Returns those of the products: per step a Gram matrix, its square, and a matrix times it."""
    if len(shape) != 2:
        return 0.0
    short, long = sorted(shape)
    return _STEPS * (4.0 * short * short * long + 2.0 * short**3)


UPDATE = Update(
    kind=torch.optim.Muon,
    copies=1,
    passes=12,
    launches=40,
    made=3,
    reach=Reach.PARAMETER,
    dims=(2,),
    flops=flops,
)
