"""Muon: the momentum of a matrix, made orthogonal by five Newton-Schulz steps (Jordan et al. 2024);
torch's own."""

import torch

from meshwright.forms.updates import Reach, Update
from meshwright.ir.graph.gemm import Gemm

_STEPS, _NARROW = 5, 2
"""Of Newton and Schulz; bytes of a value of theirs."""


def products(shape: tuple[int, ...]) -> tuple[Gemm, ...]:
    """Returns those of all Newton-Schulz steps: each makes a Gram matrix, its square, and a matrix
    times that."""
    if len(shape) != 2:
        return ()
    short, long = sorted(shape)
    step = Gemm(1, short, short, long), Gemm(1, short, short, short), Gemm(1, short, long, short)
    return step * _STEPS


def room(shape: tuple[int, ...], value_bytes: int) -> float:
    """Returns the bytes of the momentum that is looked ahead to, and in bfloat16 two matrices like
    it, its Gram matrix, and what is made of that."""
    if len(shape) != 2:
        return 0.0
    short, long = sorted(shape)
    return float(short * long * (value_bytes + 2 * _NARROW) + 2 * short * short * _NARROW)


UPDATE = Update(
    kind=torch.optim.Muon,
    copies=1,
    passes=14,  # those of its products left out
    launches=8,
    one_by_one=True,
    reach=Reach.PARAMETER,
    dims=(2,),
    products=products,
    room=room,
    products_in="bfloat16",
)
