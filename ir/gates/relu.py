"""ReLU, alone or times what goes beside it (ReGLU)."""

import torch
from torch.nn import functional as F

from meshwright.ir.gates.gate import pointwise

GATE = pointwise(F.relu, lambda grad, x: torch.ops.aten.threshold_backward.default(grad, x, 0))
