"""GELU by the error function, alone or times what goes beside it (GEGLU)."""

import torch
from torch.nn import functional as F

from meshwright.ir.gates.gate import pointwise

GATE = pointwise(F.gelu, torch.ops.aten.gelu_backward.default)
