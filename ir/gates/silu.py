"""SiLU, alone or times what goes beside it (SwiGLU)."""

import torch
from torch.nn import functional as F

from meshwright.ir.gates.gate import pointwise

GATE = pointwise(F.silu, torch.ops.aten.silu_backward.default)
