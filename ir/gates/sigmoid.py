"""The sigmoid, alone or times what goes beside it (the first gated linear unit)."""

import torch

from meshwright.ir.gates.gate import pointwise


def _slope(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    part = torch.sigmoid(x)
    return grad * part * (1 - part)


GATE = pointwise(torch.sigmoid, _slope, at_once=4)
