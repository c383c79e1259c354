"""An MLP h -> 4h -> h and its forms of tensor parallelism, as layouts written by hand.

A linear layer multiplies tokens (t), input (k) and output (n) features. An axis that splits t or n
needs the other operands whole there, one that splits k makes a sum. Between the layers a value may
lie otherwise than the multiplication needs it: then it is gathered before, or scattered after it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.prelude import PRELUDE, prelude_block
from meshwright.ir.plan.plan import BlockLayout
from meshwright.testing.models import ModelCase

Axes = dict[str, str]
"""Axis -> text."""


class Layer(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class MLP(nn.Module):
    """Layers one after the other; with `flat`, samples and positions are one dim inside."""

    def __init__(self, width: int, layers: int, bias: bool, flat: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, bias) for _ in range(layers))
        self.flat = flat

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[-1]
        if self.flat:
            x, y = x.reshape(-1, width), y.reshape(-1, width)
        for layer in self.layers:
            x = x + layer(x)
        return functional.mse_loss(x, y)


def case(
    batch: int = 4, tokens: int = 4, width: int = 4, layers: int = 4, bias: bool = True,
    flat: bool = False,
) -> ModelCase:  # fmt: skip
    def draw(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = torch.randn((2, size, tokens, width), generator=generator)
        return x, y

    return ModelCase("mlp", lambda: MLP(width, layers, bias, flat), draw, batch_size=batch)


@dataclass(frozen=True)
class Form:
    """Which dims the axes of a mesh split, and where values lie between multiplications."""

    mesh: dict[str, int]
    up: dict[str, str]
    """Axis -> which dim of the first multiplication it splits: t, n or k."""
    down: dict[str, str]
    hidden: Axes
    """Placement of what lies between the two."""
    border: Axes
    """Placement of what lies between layers."""
    stored: dict[str, Axes] = field(default_factory=dict)
    """Placement of the parameters."""
    outer: dict[str, int] = field(default_factory=dict)
    """Of axes that split t inside of others."""


def forms() -> dict[str, Form]:
    """The published ones, on 2, 4 or 8 ranks."""
    return {
        "1d": Form(
            {"tp": 2}, {"tp": "n"}, {"tp": "k"}, {"tp": "S(2)"}, {},
            {"up.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}},
        ),
        "1d_sequence": Form(
            {"tp": 2}, {"tp": "n"}, {"tp": "k"}, {"tp": "S(2)"}, {"tp": "S(1)"},
            {"up.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}},
        ),
        "2d": _square({"tp_row": 2, "tp_col": 2}, {"tp_row": 1}),
        "2.5d": _square({"tp_depth": 2, "tp_row": 2, "tp_col": 2}, {"tp_depth": 1, "tp_row": 2}),
        "3d": Form(
            {"tp_depth": 2, "tp_row": 2, "tp_col": 2},
            {"tp_depth": "t", "tp_row": "n", "tp_col": "k"},
            {"tp_depth": "t", "tp_row": "k", "tp_col": "n"},
            {"tp_depth": "S(1)", "tp_row": "S(2)", "tp_col": "S(1,outer=2)"},
            {"tp_depth": "S(1)", "tp_row": "S(1,outer=2)", "tp_col": "S(2)"},
            {
                "up.weight": {"tp_depth": "S(0,outer=2)", "tp_row": "S(0)", "tp_col": "S(1)"},
                "up.bias": {"tp_depth": "S(0,outer=2)", "tp_row": "S(0)"},
                "down.weight": {"tp_depth": "S(1,outer=2)", "tp_row": "S(1)", "tp_col": "S(0)"},
                "down.bias": {"tp_col": "S(0)"},
            },
            {"tp_depth": 1},
        ),
    }  # fmt: skip


def _square(mesh: dict[str, int], outer: dict[str, int]) -> Form:
    """2D, and 2.5D with a depth: tokens over rows, features over columns, weights over both."""
    roles = {axis: "t" for axis in outer} | {"tp_col": "n"}
    split = {axis: _shard(1, places) for axis, places in outer.items()} | {"tp_col": "S(2)"}
    weight = {"tp_row": "S(1)", "tp_col": "S(0)"}
    stored = {
        "up.weight": weight, "up.bias": {"tp_row": "S(0,outer=2)", "tp_col": "S(0)"},
        "down.weight": weight, "down.bias": {"tp_col": "S(0)"},
    }  # fmt: skip
    return Form(mesh, roles, roles, split, split, stored, outer)


def _shard(dim: int, outer: int) -> str:
    return f"S({dim},outer={outer})" if outer > 1 else f"S({dim})"


def _flattened(text: str, batch: int) -> str:
    """The same split of [samples x tokens, features]."""
    inside = {"S(1)": f"S(0,outer={batch})", "S(1,outer=2)": f"S(0,outer={2 * batch})"}
    return inside.get(text, text.replace("S(2)", "S(1)"))


def layouts(graph: Graph, form: Form, *, flat: bool = False) -> tuple[BlockLayout, ...]:
    """A layout for every pattern of the MLP's graph, and for its prelude."""
    block, sample = prelude_block(graph), {"dp": "S(0)"}
    prelude = BlockLayout(
        name="prelude by hand", pattern=PRELUDE, mesh=form.mesh, parameters={},
        inputs=tuple(sample for _ in block.inputs), outputs=tuple(sample for _ in block.outputs),
        ops={op.key: {"dp": "S(0) -> S(0)"} for op in graph.prelude_ops},
    )  # fmt: skip
    return *(_layout(graph, block, form, flat) for block in graph.distinct_blocks()), prelude


def _layout(graph: Graph, block: Any, form: Form, flat: bool) -> BlockLayout:
    def own(texts: Axes) -> Axes:
        return {a: _flattened(p, graph.batch_size) if flat else p for a, p in texts.items()}

    border, hidden = {"dp": "S(0)"} | own(form.border), {"dp": "S(0)"} | own(form.hidden)
    ops: dict[str, Axes] = {}
    for op in graph.block_ops(block):
        match op.key:
            case "up/linear" | "down/linear":
                roles = form.up if op.key.startswith("up") else form.down
                texts = _linear(roles, form.outer, len(op.inputs), flat, graph.batch_size)
                if not graph.tensors[op.inputs[0]].requires_grad:
                    texts = {
                        axis: text.replace("R|P", "R", text.startswith("R|P"))
                        for axis, text in texts.items()
                    }
                ops[op.key] = texts
            case "act/gelu":
                ops[op.key] = {axis: f"{p} -> {p}" for axis, p in hidden.items()}
            case "/add":
                ops[op.key] = {axis: f"{p} {p} -> {p}" for axis, p in border.items()}
            case "/mse_loss":
                ops[op.key] = {axis: f"{p} {p} -> P" for axis, p in border.items()}
            case _:
                ops[op.key] = {"dp": "S(0) -> S(0)"}
    given = {name: {"dp": "S(0)"} if name in graph.inputs else border for name in block.inputs}
    return BlockLayout(
        name=f"{block.pattern} by hand", pattern=block.pattern, mesh=form.mesh,
        parameters=form.stored, inputs=tuple(given[name] for name in block.inputs),
        outputs=tuple({"dp": "P"} if n == graph.loss else border for n in block.outputs), ops=ops,
    )  # fmt: skip


def _linear(
    roles: dict[str, str], outer: dict[str, int], operands: int, flat: bool, batch: int
) -> Axes:
    found = {"dp": ["S(0)", "R|P", "R|P", "S(0)"]}
    for axis, role in roles.items():
        tokens = _shard(1, outer.get(axis, 1))
        texts = {
            "t": [tokens, "R|P", "R|P", tokens],
            "n": ["R|P", "S(0)", "S(0)", "S(2)"],
            "k": ["S(2)", "S(1)", "P", "P"],
        }[role]
        if flat:  # only the activations change
            texts = [_flattened(texts[0], batch), *texts[1:3], _flattened(texts[3], batch)]
        found[axis] = texts
    return {axis: f"{' '.join(texts[:operands])} -> {texts[3]}" for axis, texts in found.items()}
