"""Loops over rows become one triangular system where they are one, and stay elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as file

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.testing.double import all_double
from meshwright.testing.interpret import interpret
from tests.ir.trace.same_gradients import check_same

SIZE = 6
SOLVE = "aten.linalg_solve_triangular.default"


def plus(x: Tensor) -> Tensor:
    for i in range(1, SIZE):
        row = x[..., i, :i].clone()
        above = x[..., :i, :i].clone()
        x[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    return x


def minus(x: Tensor) -> Tensor:
    for row in range(SIZE):
        now = x[..., row, :row].clone().unsqueeze(-2)
        x[..., row, :row] -= torch.matmul(now, x[..., :row, :row].clone()).squeeze(-2)
    return x


def half(x: Tensor) -> Tensor:
    for i in range(1, SIZE):
        row = x[..., i, :i].clone()
        x[..., i, :i] = row + 0.5 * (row.unsqueeze(-1) * x[..., :i, :i].clone()).sum(-2)
    return x


def from_second(x: Tensor) -> Tensor:
    for i in range(2, SIZE):
        row = x[..., i, :i].clone()
        x[..., i, :i] = row + (row.unsqueeze(-1) * x[..., :i, :i].clone()).sum(-2)
    return x


def of_neighbour(x: Tensor) -> Tensor:
    """Each row by the one before alone: the same for few rows."""
    for i in range(1, SIZE):
        above = x[..., i - 1, :i].clone()
        x[..., i, :i] = x[..., i, :i] + above * x[..., i, i - 1, None].clone()
    return x


def told_afterwards(x: Tensor) -> Tensor:
    for i in range(1, SIZE):
        row = x[..., i, :i].clone()
        x[..., i, :i] = row + (row.unsqueeze(-1) * x[..., :i, :i].clone()).sum(-2)
    return x + row.sum() + i


def without_gradient(x: Tensor) -> Tensor:
    for i in range(1, SIZE):
        row = x[..., i, :i].clone().detach()
        x[..., i, :i] = x[..., i, :i] + (row.unsqueeze(-1) * x[..., :i, :i].clone()).sum(-2)
    return x


def with_another(x: Tensor) -> Tensor:
    y = x.clone()
    for i in range(1, SIZE):
        row = x[..., i, :i].clone()
        x[..., i, :i] = row + (row.unsqueeze(-1) * y[..., :i, :i]).sum(-2)
    return x


class Rows(nn.Module):
    """Something computed of square matrices, row by row."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(2 * (x * self.scale).tanh()).square().mean()


def _systems(graph: Graph) -> int:
    return [op.target for op in graph.ops].count(SOLVE)


@pytest.mark.parametrize(
    ("compute", "systems"),
    [(plus, 1), (minus, 1), (half, 0), (from_second, 0), (of_neighbour, 0), (told_afterwards, 0),
     (without_gradient, 0), (with_another, 0)],
)  # fmt: skip
def test_a_loop_is_a_system_only_if_it_computes_one(
    compute: Callable[[Tensor], Tensor], systems: int
) -> None:
    """Of full matrices, in values and gradients."""
    torch.manual_seed(0)
    model, x = Rows(compute).double(), torch.randn(4, 2, SIZE, SIZE, dtype=torch.float64)
    graph = trace(model, (x,))
    assert _systems(graph) == systems
    wanted = model(x)
    (of_wanted,) = torch.autograd.grad(wanted, [model.scale])
    found = interpret(graph, model, (x,))[graph.loss]
    (of_found,) = torch.autograd.grad(found, [model.scale])
    assert torch.allclose(found, wanted, rtol=1e-12)
    assert torch.allclose(of_found, of_wanted, rtol=1e-11)
    assert "range" not in globals()


def kimi() -> nn.Module:
    """Two layers, one of the delta rule."""
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=4, num_local_experts=2, num_experts_per_token=1,
            moe_intermediate_size=8, linear_num_heads=2, linear_head_dim=4, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, experts_implementation="eager",
            layer_types=["linear_attention", "full_attention"],
        )
    )  # fmt: skip


def test_a_model_of_the_delta_rule_has_one_system_a_layer() -> None:
    with all_double():
        torch.manual_seed(0)
        model = kimi().double()
        ids = torch.randint(3, 32, (2, 8))
        batch = {"input_ids": ids, "labels": ids}
        graph = trace(model, batch)
        assert _systems(graph) == 1
        assert len(graph.ops) < 300  # over 1,000 with the loop
        assert "range" not in vars(file)
        parameters = list(model.parameters())
        wanted = model(**batch).loss
        of_wanted = torch.autograd.grad(wanted, parameters, allow_unused=True)
        found = interpret(graph, model, batch)[graph.loss]
        of_found = torch.autograd.grad(found, parameters, allow_unused=True)
    assert torch.allclose(found, wanted, rtol=1e-12)
    check_same(of_found, of_wanted, atol=1e-13)
