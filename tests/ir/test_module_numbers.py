"""Modules whose numbers differ: what may be said of them, and what is cast between them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.float8 import LINEARS
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.bounds import bound_problems
from meshwright.ir.precision import canonical, copies_of, precision
from meshwright.ir.trace.loss_module import TrainingStep
from meshwright.ir.trace.module_numbers import wide_parameters
from meshwright.ir.trace.trace import trace
from tests.ir.plans import plan


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(made: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(made.flatten(0, 1), batch["labels"].flatten())


def batch() -> dict[str, Tensor]:
    ids = torch.arange(24).view(4, 6)
    return {"ids": ids, "labels": ids + 1}


def traced(asked: str, *, tied: bool = False) -> Graph:
    return trace(Model(tied=tied), batch(), loss_fn, precision=asked)


def casts(graph: Graph) -> list[tuple[str, str]]:
    found = (op for op in graph.ops if op.target.startswith("aten.to."))
    return [(op.module_path, graph.tensors[op.outputs[0]].dtype) for op in found]


def test_values_are_cast_where_numbers_change_and_the_last_are_not_cast_back() -> None:
    graph = traced("bf16,layers.1 = fp32, layers.2=fp32, head=fp32, layers.2.norm=bf16")
    assert graph.precision == "bf16, head=fp32, layers.1=fp32, layers.2=fp32, layers.2.norm=bf16"
    assert casts(graph) == [
        ("layers.1", "float32"), ("layers.1", "bfloat16"), ("layers.2", "float32"),
        ("layers.2.norm", "bfloat16"), ("layers.2.norm", "float32"), ("layers.2", "bfloat16"),
        ("head", "float32"),
    ]  # fmt: skip
    wide = {t.fqn for t in graph.parameters if t.dtype == "float32"}
    assert wide == {"head.weight", "layers.1.norm.weight", "layers.1.norm.bias",
                    "layers.1.up.weight", "layers.1.up.bias", "layers.2.up.weight",
                    "layers.2.up.bias"}  # fmt: skip
    assert [b.pattern for b in graph.blocks][1:5] == [
        "layers.*",
        "layers.1",
        "layers.2",
        "layers.*",
    ]
    # The other way round: what is inside the narrow ones alone is narrow.
    graph = traced("fp32, layers.?=bf16")
    assert casts(graph)[:2] == [("layers.0", "bfloat16"), ("layers.0", "float32")]
    assert {t.fqn for t in graph.parameters if t.dtype == "float32"} == {
        "embed.weight", "head.weight",
    }  # fmt: skip


class SharedGelu(Model):
    """Layers of one GELU."""

    def __init__(self) -> None:
        super().__init__()
        gelu = nn.GELU()
        for layer in self.layers:
            layer.up = nn.Sequential(nn.Linear(32, 32), gelu)


@pytest.mark.parametrize("said", ["layers.1=fp32", "layers.1=fp32, *.up.1=fp32"])
def test_a_module_that_others_share_computes_as_its_caller_does(said: str) -> None:
    graph = trace(SharedGelu(), batch(), loss_fn, precision=f"bf16, {said}")
    found = [graph.tensors[op.outputs[0]].dtype for op in graph.ops if "gelu" in op.target]
    wide = "float32" if "*" in said else "bfloat16"
    assert found == [wide, "float32", wide, wide]
    assert len(casts(graph)) == (9 if "*" in said else 3)  # one of them for the loss
    with pytest.raises(MeshwrightError, match=r"are one module.*'layers.2.up.1' alone"):
        trace(SharedGelu(), batch(), loss_fn, precision="bf16, layers.2.up.1=fp32")


def test_a_loss_gets_what_the_last_module_made() -> None:
    asked = "bf16, head=fp32"
    dtypes, model, seen = copies_of(asked), Model(), list[Tensor]()
    assert dtypes
    wide = wide_parameters(model, dtypes)
    for p in model.parameters():
        p.data = p.data.to(dtypes.stepped if id(p) in wide else dtypes.read)

    def told(made: Tensor, given: dict[str, Tensor]) -> Tensor:
        seen.append(made)
        return loss_fn(made, given)

    step = TrainingStep(model, told, ("ids", "labels"), dtypes)
    step(*batch().values())
    assert seen[0].dtype == torch.float32
    assert not torch.equal(seen[0], seen[0].bfloat16().float())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_products_of_8_bits_are_where_they_are_asked_for() -> None:
    graph = traced("bf16, layers.0=fp8-rowwise, layers.2=fp8-rowwise")
    found = [op.module_path for op in graph.ops if op.target == str(LINEARS["row"])]
    assert found == ["layers.0.up", "layers.2.up"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("bf16, hed=fp32", "'hed' names no module; nearest is 'head'"),
        ("bf16, head=fp16", "all modules that read copies have the same copies; nearest is bf16"),
        ("bf16, head=bf16-sums", "have the same sums"),
        ("bf16, head=bf16-autocast", "which bf16 steps; nearest is fp32"),
        ("bf16, head=fp64", "compute in float32, which bf16 steps; nearest is fp32"),
        ("fp32, head=fp64", "have no copies of parameters"),
        ("bf16, head", "'head' must be a pattern of module paths and a precision"),
        ("bf16, head=fp32, head=bf16", "says two things of 'head'"),
        ("bf16, head=fp3", "no precision 'fp3'; nearest is 'fp32'"),
        ("bf16, layers.?=fp32, *.1=bf16", "different things of module 'layers.1'"),
        ("bf16, head=fp32", "head.weight are one parameter"),
    ],
)
def test_what_cannot_be_is_refused_in_words(asked: str, words: str) -> None:
    with pytest.raises(MeshwrightError, match=words.replace("?", "[?]")):
        traced(asked, tied="one parameter" in words)


def test_a_plan_names_them_in_one_way() -> None:
    assert canonical("bf16,b=fp32 ,a.*=fp8-rowwise") == "bf16, a.*=fp8-rowwise, b=fp32"
    assert precision("bf16, a.*=fp32, a.b=bf16").at("a.b.c").copies == "bfloat16"
    assert precision("bf16, a.*=fp32").at("a.b.c").copies == ""
    assert precision("bf16, a.*=fp32").at("a").copies == "bfloat16"
    found = {rule: said for rule, said in bound_problems(plan(precision="bf16, b=fp32,a=fp32"))}
    assert found == {"precision": "precision must be 'bf16, a=fp32, b=fp32'"}
