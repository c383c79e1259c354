"""Layers of experts in models: those of transformers, and users' own that are declared."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from benchmarks.moe_families import (
    EXACT_IN_FLOAT32,
    WIDTH,
    MoeStep,
    compare,
    layer_of,
    layers_of,
)
from meshwright.ir.errors import TraceError
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.trace.hf_experts import set_up
from meshwright.testing.interpret import interpret

UNLIKE = (
    "dbrx", "deepseek_v3", "gpt_oss", "llama4", "longcat_flash", "nemotron_h", "nllb_moe",
    "step3p7", "switch_transformers",
)  # fmt: skip
"""Families whose experts differ in form; `python -m benchmarks.moe_families` has all."""


def test_families_of_transformers() -> None:
    for family in UNLIKE:
        for cls in layers_of(family):
            found = compare(family, cls)
            assert found.stands, found


def layer_named(family: str, name: str) -> Any:
    return layer_of(next(cls for cls in layers_of(family) if cls.__name__ == name))


def test_what_is_not_one_operator_is_said() -> None:
    """As products that gather a weight for each token, or refused."""
    with pytest.warns(UserWarning, match="MuseSparkExperts: .* of no form"):
        (found,) = (compare("muse_spark", cls) for cls in layers_of("muse_spark"))
    assert not found.operators and found.worst < EXACT_IN_FLOAT32
    assert "needs the values" in compare("jetmoe", next(layers_of("jetmoe"))).why
    layer = layer_named("switch_transformers", "SwitchTransformersSparseMLP")
    layer.experts["expert_0"].dropout.p = 0.1
    with pytest.raises(TraceError, match=r"dropout of 0\.1 inside of its experts"):
        mw.trace(MoeStep(layer), {"x": torch.randn(2, 3, WIDTH, dtype=torch.float64)})


def test_experts_that_hand_tokens_on() -> None:
    layer = layer_named("longcat_flash", "LongcatFlashMoE").experts
    assert (layer.num_routed_experts, layer.total_experts) == (4, 6)
    index = torch.tensor([[0, 4], [5, 3], [4, 5], [1, 2]])
    hidden, weights = torch.randn(4, WIDTH).double(), torch.rand(4, 2).double()
    expected = layer(hidden, index, weights)
    set_up(layer)
    torch.testing.assert_close(layer(hidden, index, weights), expected, rtol=1e-12, atol=1e-12)


class Loop(nn.Module):
    """Experts one after the other, each on the tokens that picked it, up to a capacity."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.capacity = capacity
        self.router = nn.Linear(6, 4, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 5, 6)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 6, 5))

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of tokens [T, 2]; -1 of a token that came too late to an expert."""
        weights, index = self.router(x).softmax(-1).topk(2)
        one_hot = F.one_hot(index.flatten(), 4)
        before = (one_hot.cumsum(0) - one_hot).gather(1, index.view(-1, 1)).view_as(index)
        return weights, torch.where(before < self.capacity, index, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, index = self.routed(flat)
        out = torch.zeros_like(flat)
        for e in range(4):
            token, place = torch.where(index == e)
            hidden = F.silu(flat[token] @ self.w1[e].T) * (flat[token] @ self.w3[e].T)
            out.index_add_(0, token, hidden @ self.w2[e].T * weights[token, place, None])
        return out.view_as(x).pow(2).sum()


def dispatched(self: Loop, x: torch.Tensor) -> torch.Tensor:
    weights, index = self.routed(x.flatten(0, 1))
    made = mw.mix_experts(x.flatten(0, 1), index, weights, self.w1, self.w2, up=self.w3)
    return made.pow(2).sum()


class Chosen(Loop):
    """Each expert picks tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, token = self.router(flat).softmax(0).t().topk(self.capacity)
        out = torch.zeros_like(flat)
        for e in range(4):
            hidden = F.silu(flat[token[e]] @ self.w1[e].T) * (flat[token[e]] @ self.w3[e].T)
            out.index_add_(0, token[e], hidden @ self.w2[e].T * weights[e, :, None])
        return out.view_as(x).pow(2).sum()


def chosen(self: Chosen, x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    weights, token = self.router(flat).softmax(0).t().topk(self.capacity)
    picked = torch.zeros(4, len(flat), dtype=torch.bool).scatter(1, token, True).t()
    index = torch.where(picked, torch.arange(4), -1)
    spread = weights.new_zeros(4, len(flat)).scatter(1, token, weights).t()
    return mw.mix_experts(flat, index, spread, self.w1, self.w2, up=self.w3).pow(2).sum()


X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_declared(model: nn.Module, x: torch.Tensor = X, loss_fn: Any = None) -> None:
    """The traced step is the module's own forward, which the declaration left as it is."""
    graph = mw.trace(model, {"x": x}, loss_fn)
    eager, ours = deepcopy(model), deepcopy(model)
    expected = loss_fn(eager(x), None) if loss_fn else eager(x)
    expected.backward()
    loss = interpret(graph, ours, {"x": x})[graph.loss]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)
    assert sum(op.target == EXPERTS_TARGET for op in graph.ops) == 1


def test_declared_layers() -> None:
    """By instance, by class, by decorator; a class that says its own forward is another."""
    with pytest.raises(TraceError, match=r"meshwright\.declare_experts\(layer, forward\)"):
        mw.trace(Loop().double(), {"x": X})
    check_declared(mw.declare_experts(Loop().double(), dispatched))
    check_declared(mw.declare_experts(Loop(capacity=1).double(), dispatched))
    mixture = mw.experts_by(dispatched)(type("Mixture", (Loop,), {"forward": Loop.forward}))
    check_declared(mixture().double())
    check_declared(mw.declare_experts(Chosen().double(), chosen))
    with pytest.raises(TraceError, match="needs the values"):
        mw.trace(type("Other", (mixture,), {"forward": Loop.forward})().double(), {"x": X})
    with pytest.raises(TraceError, match="neither a module nor a class"):
        mw.declare_experts(dispatched, dispatched)


def test_example_of_the_docs() -> None:
    text = (Path(mw.__file__).parents[1] / "docs" / "experts.md").read_text()
    found: dict[str, Any] = {}
    exec(text.split("```python")[1].split("```")[0], found)
    torch.manual_seed(0)
    layer = found["Mixture"]().double()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    assert (layer.route(x)[1] == -1).any()
    check_declared(layer, x, lambda made, _: made.pow(2).sum())
