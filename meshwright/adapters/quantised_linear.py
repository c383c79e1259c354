"""Linear layers whose weights are kept in few bits, and a model whose layers become such."""

import torch
from torch import Tensor, nn

from meshwright.adapters.formats import Encoded, weight_format
from meshwright.adapters.linears import (
    Patterns,
    Place,
    bias_of,
    chosen,
    places,
    shared_weights,
    weight_of,
)
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.quantised import QUANTISED_LINEAR, dequantised, packed


class QuantisedLinear(nn.Module):
    """A frozen linear layer, x [..., in] -> [..., out]: `codes`, `scale` and `zero` of blocks of
    its weight along `in`, as `ir.graph.quantised` says, and a bias in full."""

    zero: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, encoded: Encoded, bias: Tensor | None, form: str) -> None:
        """`encoded`: of blocks of the weight, in a format of `adapters/formats`."""
        super().__init__()
        self.out_features, groups, self.block = encoded.codes.shape
        self.in_features, self.form = groups * self.block, form
        self.bits = weight_format(form).bits
        self.codes = _frozen(packed(encoded.codes, self.bits))
        self.scale = _frozen(encoded.scale)
        self.zero = None if encoded.zero is None else _frozen(encoded.zero)
        self.bias = None if bias is None else _frozen(bias.detach())

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, form: str, block: int) -> "QuantisedLinear":
        """Encodes a weight [out, in] in blocks of `block` values; one on the meta device gives
        shapes alone. PlanError where a block would not be whole."""
        check_block(weight.shape[1], block, weight_format(form).bits)
        with torch.no_grad():
            values = weight.detach().reshape(weight.shape[0], -1, block)
            return cls(weight_format(form).encode(values), bias, form)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out] in the dtype of x."""
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)
        made: Tensor = QUANTISED_LINEAR(blocks, self.codes, self.scale, self.zero, self.bits)
        return made if self.bias is None else made + self.bias

    def dequantised(self) -> Tensor:
        """Returns the weight [out, in] in full, in the dtype of the scales."""
        return dequantised(self.codes, self.scale, self.zero, self.bits, self.scale.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.form}, block={self.block}"


def quantise(
    model: nn.Module,
    form: str = "nf4",
    *,
    block: int = 64,
    only: Patterns = "*",
    skip: Patterns = (),
) -> nn.Module:
    """Puts quantised layers in the place of linear ones, which are frozen by that, and returns the
    model, which is changed.

    `form` is a file of `adapters/formats`: `nf4`, `int4`, `int8`. `only` and `skip` are module
    paths or patterns. In a model of which something is frozen, such as one with adapters, layers
    that are trained stay as they are; so do layers whose weight others share. PlanError where
    there is nothing to quantise, or a block of a layer would not be whole.
    """
    weight_format(form)
    shared = shared_weights(model)
    some = any(not p.requires_grad for p in model.parameters())
    found = [
        place for place in places(model)
        if id(place.module.weight) not in shared
        and not (some and any(p.requires_grad for p in place.module.parameters()))
    ]  # fmt: skip
    for place in chosen(found, only, skip, "can be quantised"):
        place.put(_quantised(place, form, block))
    return model


def _quantised(place: Place, form: str, block: int) -> QuantisedLinear:
    try:
        made = QuantisedLinear.of(weight_of(place.module), bias_of(place.module), form, block)
    except PlanError as error:
        raise PlanError(f"{place.path}: {error}; or leave it out by `skip`") from error
    return made.train(place.module.training)


def check_block(width: int, block: int, bits: int) -> None:
    """PlanError unless `width` values are whole blocks, and a block whole bytes."""
    if block > 0 and width % block == 0 and block * bits % 8 == 0:
        return
    legal = [n for n in range(1, width + 1) if width % n == 0 and n * bits % 8 == 0]
    near = min(legal, key=lambda n: abs(n - block), default=0)
    raise PlanError(
        f"{width} inputs in blocks of {block} values of {bits} bits: a block would not be whole"
        + (f"; the nearest block is {near}" if near else "")
    )


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
