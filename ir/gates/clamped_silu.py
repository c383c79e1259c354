"""SwiGLU of clamped values: silu(min(gate, limit)) times up within plus and minus limit."""

import torch
from torch.nn import functional as F

from meshwright.ir.gates.gate import ExpertGate, Settings, Tensors, inside


def _forward(parts: Tensors, settings: Settings) -> torch.Tensor:
    gate, up = parts
    limit = settings["limit"]
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _backward(grad: torch.Tensor, parts: Tensors, settings: Settings) -> Tensors:
    gate, up = parts
    limit = settings["limit"]
    low, near = gate.clamp(max=limit), up.clamp(-limit, limit)
    slope = torch.ops.aten.silu_backward.default(grad * near, low)
    return slope * (gate <= limit), grad * F.silu(low) * inside(up, -limit, limit)


GATE = ExpertGate(_forward, _backward, ("limit",), frozenset({2}), {2: 6.125})
