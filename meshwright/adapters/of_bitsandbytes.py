"""Layers of bitsandbytes in four bits become quantised layers with the same values."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapters.formats import Encoded
from meshwright.adapters.quantised_linear import QuantisedLinear, check_block
from meshwright.ir.errors import PlanError


def of_bitsandbytes(model: nn.Module) -> nn.Module:
    """Puts quantised layers in the place of `bitsandbytes.nn.Linear4bit` and returns the model,
    which is changed. PlanError of one that is not quantised yet or not in NF4, or whose blocks go
    over the end of a row."""
    found = [
        (path, module) for path, module in model.named_modules()
        if any(base.__name__ == "Linear4bit" for base in type(module).__mro__) and path
    ]  # fmt: skip
    if not found:
        raise PlanError("the model has no Linear4bit of bitsandbytes; `mw.quantise` takes others")
    for path, module in found:
        try:
            made = _made(module)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).register_module(name, made.train(module.training))
    return model


def _made(module: Any) -> QuantisedLinear:
    state = getattr(module.weight, "quant_state", None)
    if state is None or state.quant_type != "nf4":
        what = "not quantised yet: move it to its device" if state is None else state.quant_type
        raise PlanError(f"it is {what}; nearest is NF4")
    rows, width = state.shape
    check_block(width, state.blocksize, 4)
    scale: Tensor = state.absmax
    if state.nested:
        functional = import_module("bitsandbytes.functional")
        scale = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    # The first of two codes lies in the high half there.
    codes = module.weight.data.reshape(-1)
    codes = torch.stack((codes >> 4, codes & 15), -1).view(rows, -1, state.blocksize)
    encoded = Encoded(codes, scale.view(rows, -1).float(), None)
    return QuantisedLinear(encoded, module.bias, "nf4")
