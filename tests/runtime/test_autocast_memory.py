"""Memory in narrow and wide numbers on a CPU: predicted beside tracked bytes of tensors."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing import models
from meshwright.testing.apart_libraries import with_library
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks
from tests.small_languages import gpt2, llama, mixtral
from tests.told_memory import told_of_held

WORDS, TOKENS = 128, 64


class _Language(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _gpt2() -> nn.Module:
    return gpt2(WORDS, TOKENS, 64, heads=4)


def _llama() -> nn.Module:
    return llama(WORDS, TOKENS, 64, 192, heads=4)


CASES = [
    *((make, precision) for make in (_gpt2, _llama) for precision in ("bf16-autocast", "bf16")),
    (_llama, "fp8-rowwise"), (_llama, "fp8-tensorwise"), (_llama, "fp64"),
]  # fmt: skip
"""GPT-2's products are no linear layers, which alone are of 8-bit floats."""


@pytest.mark.parametrize(("make", "precision"), CASES)
def test_predicted_memory_is_what_tensors_hold(make, precision) -> None:
    with_library("torchao")
    torch.manual_seed(0)
    model, data = _Language(make()), (torch.randint(WORDS, (8, TOKENS)),)
    if precision == "fp64":
        model.double()  # its norms and angles are in float32 all the same
    assert told_of_held(model, data, precision) == pytest.approx(1.0, abs=0.01)


class _Products(nn.Module):
    """Linear layers, the last of which is not of 8-bit floats."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


PRODUCTS = {"wide": ((512, 512, 512, 16), 256), "tall": ((64, 256, 64, 16), 4096)}
"""Widths and rows: weights have most of the bytes, or values."""


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("precision", ["fp8-rowwise", "fp8-tensorwise"])
def test_what_casts_to_8_bits_hold_is_predicted(precision, shape, microbatches) -> None:
    """Before a weight's gradient is made, and as it is; and a gradient that nobody wants, of what
    the first layer reads."""
    with_library("torchao")
    torch.manual_seed(0)
    widths, rows = PRODUCTS[shape]
    data = (torch.randn(rows, widths[0]),)
    told = told_of_held(_Products(*widths), data, precision, microbatches=microbatches)
    assert told == pytest.approx(1.0, abs=0.002)


class _PartsOfOwn(nn.Module):
    """A layer in float64 and one value in bfloat16, in a model in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide, self.down = (
            nn.Linear(64, 64),
            nn.Linear(64, 64).double(),
            nn.Linear(64, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(torch.tanh(self.up(x)).double())).float()
        return self.down(torch.tanh(x.bfloat16()).float()).square().mean()


def test_parts_in_numbers_of_their_own_are_held_so() -> None:
    torch.manual_seed(0)
    found = told_of_held(_PartsOfOwn(), (torch.randn(512, 64),), "fp32", "adamw")
    assert found == pytest.approx(1.0, abs=0.001)


SHARDED = [
    (_gpt2, "fp32", 3, 1), (_gpt2, "bf16-autocast", 3, 2), (_gpt2, "fp16", 1, 1),
    (_llama, "fp64", 2, 2), (_llama, "bf16", 3, 2), (_llama, "tf32", 3, 1),
    (_llama, "fp8-rowwise", 3, 2), (_llama, "fp8-tensorwise", 3, 2),
]  # fmt: skip
"""With how many micro-batches under which `zero`."""


def _made(make: Any, precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = _Language(make())
    return model.double() if precision == "fp64" else model


def _most(jobs: list[tuple[Any, Plan, Graph]], data: tuple[Tensor, ...]) -> list[int]:
    with_library("torchao")
    return [
        peak_of(
            compile_job(_made(make, plan.precision), plan, optimizer="adamw", device="cpu",
                        check=False, example_inputs=data, graph=graph),
            data,
        )
        for make, plan, graph in jobs
    ]  # fmt: skip


def test_ranks_that_share_hold_what_is_predicted() -> None:
    """Of a tied weight, whose gradient waits for its first reader, too; and of a block's parameters
    that come while the gradient that it is given is there; and of an 8-bit product, whose operands
    are cast before there is a gradient of its weight."""
    with_library("torchao")
    data = (torch.randint(WORDS, (8, TOKENS)),)
    jobs, told = [], []
    for make, precision, zero, parts in SHARDED:
        graph = trace(_made(make, precision), data, precision=precision)
        problem = make_problem(graph, Cluster.local(2), precision=precision, optimizer="adamw")
        choice = uniform_choice(problem, dp_shard=2, zero=zero, num_microbatches=parts)
        plan = build_plan(problem, choice)
        assert plan.predicted
        jobs.append((make, plan, graph))
        told.append(plan.predicted.stages[0].memory.tensor_bytes)
    for held in run_ranks(2, _most, jobs, data):
        assert [a / b for a, b in zip(told, held, strict=True)] == pytest.approx(
            [1.0] * len(told), abs=0.002
        )


def _few_tokens(mixture: bool) -> nn.Module:
    """Weights have most of the bytes."""
    if mixture:
        return mixtral(WORDS, TOKENS, 256, 64, heads=4)
    return llama(WORDS, TOKENS, 256, 256, heads=4)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_gradients_of_narrow_copies_are_there_as_they_are_made(mixture, precision, microbatches):
    """They are cast when what their block has saved is gone. Experts cast what they read."""
    torch.manual_seed(0)
    model, data = _Language(_few_tokens(mixture)), (torch.randint(WORDS, (4, 32)),)
    found = told_of_held(model, data, precision, microbatches=microbatches)
    assert found == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_on_their_way_are_there_as_long_as_somebody_has_them(precision, microbatches):
    """What enters a layer is added to apart, as its caller has it, too; what attention is given
    goes when that has read it, though its values are reshaped on their way."""
    torch.manual_seed(0)
    model, data = _Language(_few_tokens(mixture=False)), (torch.randint(WORDS, (4, 32)),)
    found = told_of_held(model, data, precision, microbatches=microbatches)
    assert found == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize("name", ["bert_mlm", "t5"])
def test_what_comes_into_a_block_is_cast_once_for_all_that_read_it(name):
    """Queries, keys and values of what a layer is given, and of what an encoder has made. A mask
    is made of narrow numbers; attention by products, whose bias is trained, keeps wide ones."""
    case = models.CASES[name]
    model, data = case.model(torch.float32), case.example(case.batch_size, dtype=torch.float32)
    found = told_of_held(model, data, "bf16-autocast", "adamw")
    assert found == pytest.approx(1.0, abs=0.004)
