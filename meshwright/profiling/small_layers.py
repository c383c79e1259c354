"""Layers of a small model, to tell what dispatching ops takes where they have work to do.

A chain of one op on next to no data says what the cheapest dispatch takes. Ops of a model take
more: they have more operands, views come between, and what each of them moves drives its own code
and autograd's out of the caches. So a dispatch is what these layers take beyond their kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

_WIDTH, _HEADS, _TOKENS, _SAMPLES, _LAYERS = 128, 4, 64, 1, 4
_SHAPES = {
    "scale": (_WIDTH,), "shift": (_WIDTH,),
    "into": (3 * _WIDTH, _WIDTH), "into_bias": (3 * _WIDTH,),
    "out": (_WIDTH, _WIDTH), "out_bias": (_WIDTH,),
    "up": (4 * _WIDTH, _WIDTH), "up_bias": (4 * _WIDTH,),
    "down": (_WIDTH, 4 * _WIDTH), "down_bias": (_WIDTH,),
}  # fmt: skip


class _SmallLayers(nn.Module):
    """Transformer layers as emitted code has them: calls of functions, no modules inside."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(_LAYERS):
            for name, shape in _SHAPES.items():
                self.register_parameter(f"{name}{layer}", nn.Parameter(torch.full(shape, 0.1)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(_LAYERS):
            x = self._layer(x, {n: self.get_parameter(f"{n}{layer}") for n in _SHAPES})
        return x.mean()

    def _layer(self, x: Tensor, of: Mapping[str, Tensor]) -> Tensor:
        normed = functional.layer_norm(x, (_WIDTH,), of["scale"], of["shift"])
        q, k, v = (
            part.view(_SAMPLES, _TOKENS, _HEADS, _WIDTH // _HEADS).transpose(1, 2)
            for part in functional.linear(normed, of["into"], of["into_bias"]).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = seen.transpose(1, 2).reshape(_SAMPLES, _TOKENS, _WIDTH)
        x = x + functional.linear(seen, of["out"], of["out_bias"])
        wide = functional.gelu(functional.linear(x, of["up"], of["up_bias"]))
        return x + functional.linear(wide, of["down"], of["down_bias"])


def small_step() -> Callable[[], None]:
    """Forward and backward of the layers in plain PyTorch; gradients are new."""
    model, x = _SmallLayers(), torch.ones(_SAMPLES, _TOKENS, _WIDTH)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


@lru_cache(maxsize=1)
def _graph() -> Graph:
    return trace(_SmallLayers(), (torch.ones(_SAMPLES, _TOKENS, _WIDTH),))


def dispatch_s(device: DeviceType, step_s: float) -> float:
    """Seconds of one dispatch with which the device's price of the layers is what a step of them
    took; at least the device's own."""
    kernels_s = _priced_s(replace(device, overhead_s=0.0))
    each_s = _priced_s(device) - kernels_s
    if each_s <= 0.0:
        return device.overhead_s
    return device.overhead_s * max(1.0, (step_s - kernels_s) / each_s)


def _priced_s(device: DeviceType) -> float:
    """Of a forward and a backward in one process, without what our runtime costs."""
    alone = Cluster.local(1)
    cluster = replace(alone, device_types=(replace(device, name=alone.device_types[0].name),))
    problem = make_problem(_graph(), cluster, precision="fp32", optimizer="sgd")
    predicted = build_plan(problem, uniform_choice(problem)).predicted
    assert predicted and predicted.breakdown
    return predicted.breakdown.forward_s + predicted.breakdown.backward_s
