"""SwiGLU of values that saturate: cap(gate, gate_cap) sigmoid(gate) cap(up, up_cap), where
cap(x, c) = c tanh(x / c)."""

import torch

from meshwright.ir.gates.gate import ExpertGate, Settings, Tensors


def _forward(parts: Tensors, settings: Settings) -> torch.Tensor:
    gate, up = parts
    first, second = settings["gate_cap"], settings["up_cap"]
    capped = first * torch.tanh(gate / first)
    return capped * torch.sigmoid(gate) * (second * torch.tanh(up / second))


def _backward(grad: torch.Tensor, parts: Tensors, settings: Settings) -> Tensors:
    gate, up = parts
    first, second = settings["gate_cap"], settings["up_cap"]
    bent, flat, part = torch.tanh(gate / first), torch.tanh(up / second), torch.sigmoid(gate)
    slope = (1 - bent * bent) * part + first * bent * part * (1 - part)
    return grad * slope * (second * flat), grad * (first * bent) * part * (1 - flat * flat)


GATE = ExpertGate(_forward, _backward, ("gate_cap", "up_cap"), frozenset({2}), {2: 8})
