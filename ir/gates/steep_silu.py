"""SwiGLU of clamped values with a steeper sigmoid and 1 added to what it multiplies, as gpt-oss has
it: g sigmoid(alpha g) (u + 1), with g = min(gate, limit) and u = up within plus and minus limit."""

import torch

from meshwright.ir.gates.gate import ExpertGate, Settings, Tensors, inside


def _forward(parts: Tensors, settings: Settings) -> torch.Tensor:
    gate, up = parts
    alpha, limit = settings["alpha"], settings["limit"]
    low = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (low * torch.sigmoid(low * alpha))


def _backward(grad: torch.Tensor, parts: Tensors, settings: Settings) -> Tensors:
    gate, up = parts
    alpha, limit = settings["alpha"], settings["limit"]
    low = gate.clamp(max=limit)
    part = torch.sigmoid(low * alpha)
    slope = part * (1 + alpha * low * (1 - part)) * (gate <= limit)
    return (
        grad * (up.clamp(-limit, limit) + 1) * slope,
        grad * low * part * inside(up, -limit, limit),
    )


GATE = ExpertGate(_forward, _backward, ("alpha", "limit"), frozenset({2}), {2: 6}, flags=1)
