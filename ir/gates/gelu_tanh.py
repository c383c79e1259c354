"""GELU by tanh, alone or times what goes beside it."""

from functools import partial

import torch
from torch.nn import functional as F

from meshwright.ir.gates.gate import pointwise

GATE = pointwise(
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward.default, approximate="tanh"),
)
