"""Linear layers whose products are of 8-bit floats, scaled as they are cast (torchao's).

`torch.ops.meshwright.rowwise_linear` and `tensorwise_linear` exist once this module is imported.
"""

from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.torch_private import is_fake

MULTIPLE = 16
"""Kernels for 8-bit floats take matrices whose sizes are multiples of it."""
_RECIPES = {"tensor": "tensorwise", "row": "rowwise"}
"""What has a scale of its own, and torchao's word for that."""


def fits_float8(gemm: Gemm) -> bool:
    """Tells whether a product and both of its backward have sizes that kernels take; else it is of
    values as they are."""
    return not any(size % MULTIPLE for size in (gemm.m, gemm.n, gemm.k))


def _linear(recipe: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[..., k] weight[n, k] (bias[n]) -> [..., n]. PlanError if torchao is not installed."""
    n, k = weight.shape
    if is_fake(x) or x.is_meta or not fits_float8(Gemm(1, x.numel() // max(1, k), n, k)):
        return F.linear(x, weight, bias)
    made: Tensor = functional_call(_layer(k, n, recipe), {"weight": weight}, (x,))
    return made if bias is None else made + bias.to(made.dtype)


def check_float8(scaling: str) -> None:
    """PlanError if torchao is not installed."""
    _layer(MULTIPLE, MULTIPLE, _RECIPES[scaling])


@cache
def _layer(k: int, n: int, recipe: str) -> nn.Module:
    """A layer of torchao's without a bias, whose weight is given at each call."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PlanError(
            "products of 8-bit floats are torchao's, which is not installed: pip install torchao; "
            "nearest is precision bf16"
        ) from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    plain = nn.Sequential(nn.Linear(k, n, bias=False, device="meta"))
    made: nn.Module = convert_to_float8_training(plain, config=config)[0]
    return made


for _recipe in _RECIPES.values():
    _name = f"{_recipe}_linear"
    LIBRARY.define(f"{_name}(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
    LIBRARY.impl(_name, partial(_linear, _recipe), "CompositeImplicitAutograd")
LINEARS = {
    scaling: getattr(torch.ops.meshwright, f"{recipe}_linear").default
    for scaling, recipe in _RECIPES.items()
}
