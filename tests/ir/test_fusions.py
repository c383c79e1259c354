"""Fused kernels are found in models as their authors write them, and only there."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Fusion, Graph, Missed
from meshwright.ir.kernels import KERNELS
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from meshwright.testing.models import CASES
from tests.traces import zoo_graph


def fused(name: str) -> Graph:
    case = CASES[name]
    return trace(case.model(), case.example(), case.loss_fn, kernels=KERNELS)


def places(graph: Graph) -> dict[str, int]:
    return {f.kernel: f.places for f in graph.fusions if f.places}


def targets(graph: Graph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops]


@pytest.mark.parametrize(
    ("name", "wanted", "missed"),
    [
        ("llama", {"cross_entropy": 1, "linear_cross_entropy": 1, "rms_norm": 9, "rotary": 8,
                   "swiglu": 4}, []),
        ("gpt2", {"bias_gelu": 4, "cross_entropy": 1, "gelu": 4, "layer_norm": 4,
                  "linear_cross_entropy": 1}, []),
        ("bert_mlm", {"bias_gelu": 5, "cross_entropy": 1, "layer_norm": 8},
         ["its product has a bias"]),
    ],
)  # fmt: skip
def test_models_of_transformers(name, wanted, missed):
    graph = fused(name)
    assert places(graph) == wanted
    assert [miss.why for fusion in graph.fusions for miss in fusion.missed] == missed


def test_what_a_kernel_stands_for_is_gone():
    graph, plain = fused("llama"), zoo_graph(CASES["llama"])
    assert not {"pow", "rsqrt", "silu", "neg"} & set(targets(graph))
    assert len(graph.ops) < 0.6 * len(plain.ops)
    assert graph.fingerprint != plain.fingerprint
    assert {b.pattern for b in graph.blocks} == {b.pattern for b in plain.blocks}
    # What autograd keeps is asked of the kernels, and is less.
    kept = [sum(g.tensors[n].nbytes for op in g.ops for n in op.saved) for g in (graph, plain)]
    assert kept[0] < kept[1]


class Gated(nn.Module):
    """Two ways in which a gated product is not SwiGLU's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(self.gate(x))
        if self.way == "read twice":
            return gate * self.up(x) + gate
        return gate * self.up(x)[:, :1]


@pytest.mark.parametrize(
    ("way", "why"), [("read twice", "aten.silu.default is read elsewhere too"),
                     ("narrow", "the other factor is broadcast")],
)  # fmt: skip
def test_why_a_kernel_was_not_put_in_is_said(way, why):
    x = torch.randn(4, 6)
    graph = trace(Gated(way), (x, x), nn.functional.mse_loss, kernels=("swiglu",))
    (fusion,) = graph.fusions
    assert fusion.places == 0 and [m.why for m in fusion.missed] == [why]
    assert "silu" in targets(graph)


class Turned(nn.Module):
    """Rotary embedding whose angles may differ between the halves."""

    def __init__(self, halves: float) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("cos", torch.rand(1, 5, 8))
        self.register_buffer("sin", torch.rand(1, 5, 8))
        self.register_buffer("angle", torch.rand(1, 5, 4))
        self.halves = halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        swapped = torch.cat((-q[..., 4:], q[..., :4]), -1)
        if not self.halves:
            return q * self.cos.unsqueeze(1) + swapped * self.sin.unsqueeze(1)
        other = self.angle if self.halves == 1.0 else self.angle * self.halves
        angle = torch.cat((self.angle, other), -1)
        return q * angle.cos().unsqueeze(1) + swapped * angle.sin().unsqueeze(1)


@pytest.mark.parametrize(("halves", "places"), [(0.0, 0), (2.0, 0), (1.0, 1)])
def test_angles_whose_halves_may_differ_are_left_alone(halves, places):
    x = torch.randn(2, 3, 5, 8)
    graph = trace(Turned(halves), (x, x), nn.functional.mse_loss, kernels=("rotary",))
    (fusion,) = graph.fusions
    assert fusion.places == places
    whys = ["the halves of its angles may differ"] * (1 - places)
    assert [m.why for m in fusion.missed] == whys


class ByHalves(nn.Module):
    """Rotary embedding as gpt-oss (halves) and DeepSeek (pairs) write it, and two that are none."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("angle", torch.rand(1, 5, 4))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        a, b = (q[..., ::2], q[..., 1::2]) if self.way == "pairs" else q.chunk(2, -1)
        cos, sin = self.angle.cos().unsqueeze(1), self.angle.sin().unsqueeze(1)
        if self.way == "both less":
            return torch.cat((a * cos - b * sin, b * cos - a * sin), -1)
        if self.way == "other angle":
            return torch.cat((a * cos - b * sin, b * sin + a * cos), -1)
        return torch.cat((a * cos - b * sin, sin * a + b * cos), -1)


@pytest.mark.parametrize(
    ("way", "places"), [("halves", 1), ("pairs", 1), ("both less", 0), ("other angle", 0)]
)
def test_heads_that_are_turned_by_halves(way, places):
    model, batch = ByHalves(way).double(), tuple(torch.randn(2, 2, 3, 5, 8, dtype=torch.float64))
    graph = trace(model, batch, nn.functional.mse_loss, kernels=("rotary",))
    assert graph.fusions == (Fusion("rotary", places),)
    assert ("chunk" in targets(graph) or "slice" in targets(graph)) == (not places)
    found = []
    for loss in (interpret(graph, model, batch)[graph.loss],
                 nn.functional.mse_loss(model(batch[0]), batch[1])):  # fmt: skip
        model.zero_grad()
        loss.backward()
        found.append((loss.detach(), model.project.weight.grad.clone()))
    torch.testing.assert_close(*found, rtol=1e-14, atol=1e-15)


class Narrowed(nn.Module):
    """A norm whose gain is in float32, too, as OLMo and gpt-oss have it, and a reader of that."""

    def __init__(self, *, read: bool, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.read, self.wide = read, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.wide)
        normed = self.gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))
        return normed.to(x.dtype) + normed.mean() if self.read else normed.to(x.dtype)


@pytest.mark.parametrize("read", [False, True])
def test_a_cast_to_what_a_kernel_makes_is_taken_in(read):
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    model = Narrowed(read=read).bfloat16()
    graph = trace(model, (x, x), nn.functional.mse_loss, kernels=("rms_norm",))
    (fusion,) = graph.fusions
    whys = ["its result is torch.float32, the kernel's is torch.bfloat16"]
    assert (fusion.places, [m.why for m in fusion.missed]) == ((0, whys) if read else (1, []))
    if not read:
        assert targets(graph)[0] == "rms_norm" and "to" not in targets(graph)


def test_a_cast_of_what_is_wider_than_a_kernel_computes_is_not():
    x = torch.randn(4, 8)
    graph = trace(Narrowed(read=False, wide=torch.float64), (x, x), nn.functional.mse_loss,
                  kernels=("rms_norm",))  # fmt: skip
    (fusion,) = graph.fusions
    whys = ["its result is torch.float64, the kernel's is torch.float32"]
    assert (fusion.places, [m.why for m in fusion.missed]) == (0, whys)


def test_a_kernel_that_does_not_pay_is_left_out():
    case = CASES["gpt2"]
    asked = []

    def wins(before, after, tensors):
        asked.append((len(before), [op.target for op in after]))
        assert all(n in tensors for op in (*before, *after) for n in (*op.inputs, *op.outputs))
        return "it is slow"

    graph = trace(case.model(), case.example(), kernels=("gelu",), wins=wins)
    # Its four layers are one place.
    assert asked[0] == (8, ["aten.gelu.default"])
    miss = Missed("transformer.h.*.mlp.act", "it is slow", 4, declined=True)
    assert graph.fusions == (Fusion("gelu", 0, (miss,), priced=True),)
    plain = zoo_graph(case)
    assert replace(graph, fusions=()).fingerprint == plain.fingerprint


def test_a_plans_kernels_are_put_in_as_they_were():
    """What was declined stays out, though nobody is asked again."""
    case = CASES["gpt2"]

    def wins(before, after, tensors):
        return "it is slow" if "norm" in after[-1].target else ""

    first = trace(case.model(), case.example(), kernels=KERNELS, wins=wins)
    assert places(first) == {
        "bias_gelu": 4, "cross_entropy": 1, "gelu": 4, "linear_cross_entropy": 1,
    }  # fmt: skip
    again = trace(case.model(), case.example(), kernels=first.fusions)
    assert (again.fingerprint, again.fusions) == (first.fingerprint, first.fusions)
    assert again.fingerprint != fused("gpt2").fingerprint


class Activated(nn.Module):
    """GELU of a product with a bias, and what looks like it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.product = nn.Linear(6, 8, bias=way != "no bias")
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.product.weight, self.product.bias
        match self.way:
            case "weighted":
                made = torch.addmm(bias, x, weight.T, beta=2.0)
            case "cut anew":
                made = self.product(x).view(-1, 4)
            case "column":
                made = torch.addmm(bias.view(-1, 1)[:4], x, weight.T)
            case _:
                made = self.product(x)
        active = nn.functional.gelu(made).reshape(4, 8)
        return active + made if self.way == "read twice" else active


@pytest.mark.parametrize(
    ("way", "places", "whys"),
    [
        ("linear", 1, []),
        ("no bias", 0, []),
        ("weighted", 0, ["its product or bias is weighted"]),
        ("cut anew", 0, ["its bias is no row of what it is of"]),
        ("column", 0, ["its bias is no row of what it is of"]),
        ("read twice", 0, ["aten.linear.default is read elsewhere too"]),
    ],
)
def test_a_bias_that_gelu_adds(way, places, whys):
    given = torch.randn(4, 6), torch.randn(4, 8)
    kernels = ("bias_gelu",)
    graph = trace(Activated(way), given, nn.functional.mse_loss, kernels=kernels)
    (fusion,) = graph.fusions
    assert fusion.places == places and [m.why for m in fusion.missed] == whys
    biased = [op for op in graph.ops if op.target == "aten.linear.default" and len(op.inputs) == 3]
    assert len(biased) == (way in ("cut anew", "read twice"))


class CastAndKept(nn.Module):
    """RMSNorm of a value in a wider type, which the residual sum reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.out(x).double()
        normed = self.gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).float()
        return (normed + wide.float()).sum()


def test_a_cast_that_others_read_stays_for_them():
    graph = trace(CastAndKept(), (torch.randn(4, 6),), kernels=("rms_norm",))
    assert graph.fusions == (Fusion("rms_norm", 1),)
    assert targets(graph).count("to") == 2 and "rsqrt" not in targets(graph)


def test_names_of_kernels_are_a_list():
    with pytest.raises(PlanError, match=r"in a list, such as \['rms_norm'\]"):
        trace(CastAndKept(), (torch.randn(4, 6),), kernels="rms_norm")


def test_an_unknown_kernel_is_refused():
    case = CASES["gpt2"]
    with pytest.raises(PlanError, match=r"'swigloo' is not known: .*nearest: swiglu"):
        trace(case.model(), case.example(), kernels=("swigloo",))


class Shifted(nn.Module):
    """A norm whose gain is made between the sum before it and itself, as in Nemotron."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
        self.bias = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.inner(x)
        normed = torch.nn.functional.layer_norm(total, (6,), self.gain + 1, self.bias)
        return (total + normed).square().sum()


def test_a_gain_that_is_made_after_the_sum_is_there_when_it_is_read():
    graph = trace(Shifted(), (torch.rand(4, 6),), kernels=("layer_norm",))
    assert places(graph) == {"layer_norm": 1}
    makes = {name for op in graph.ops for name in op.outputs}
    made = set(graph.tensors) - makes
    for op in graph.ops:
        assert set(filter(None, op.inputs)) <= made, op.target
        made |= set(op.outputs)
