"""The square of ReLU, alone or times what goes beside it."""

from torch.nn import functional as F

from meshwright.ir.gates.gate import pointwise

GATE = pointwise(lambda x: F.relu(x).square(), lambda grad, x: grad * 2 * F.relu(x), at_once=3)
