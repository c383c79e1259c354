"""Triangular systems, and the model of transformers that has them only where it is not exported."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as file

from meshwright.ir.ops import facts
from meshwright.ir.trace.trace import trace
from tests.told_memory import told_of_held

SIZES = [(True, 48, 32), (True, 32, 96), (False, 48, 48)]
"""From the left; of the triangle; of what is solved for."""


class _Solves(nn.Module):
    def __init__(self, left: bool, size: int, columns: int) -> None:
        super().__init__()
        self.left = left
        self.triangle, self.right = nn.Linear(size, size), nn.Linear(size, columns)
        self.out = nn.Linear(columns, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.linalg.solve_triangular(
            self.triangle(x), self.right(x), upper=False, left=self.left, unitriangular=True
        )
        return self.out(made.tanh()).square().mean()


@pytest.mark.parametrize(("left", "size", "columns"), SIZES)
def test_flops_and_memory_are_those_of_torchs(left: bool, size: int, columns: int) -> None:
    torch.manual_seed(0)
    model, x = _Solves(left, size, columns), 0.1 * torch.randn(16, size, size)
    (op,) = (op for op in trace(model, (x,)).ops if "solve_triangular" in op.target)
    assert op.flops == 16 * size * size * columns
    assert told_of_held(model, (x,), "fp32") == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("left", [True, False])
def test_ranks_have_samples_and_columns_and_no_part_of_a_triangle(left: bool) -> None:
    graph = trace(_Solves(left, 16, 16), (torch.zeros(4, 16, 16),))
    (op,) = (op for op in graph.ops if "solve_triangular" in op.target)
    make = facts(op.target).rule
    rule = make(op, graph) if make else None
    assert rule is not None and rule.outputs[0][-2 if left else -1] == ("n",)
    assert "n" not in rule.split and "m" not in rule.split and "k" in rule.split
    assert rule.linear == (frozenset({1}),)


def test_a_model_is_traced_as_it_runs_not_as_it_is_exported() -> None:
    """Two systems a layer for a loop over 64 rows."""
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    asked, ids = file.is_torchdynamo_exporting, torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        model = Qwen3NextForCausalLM(config)
    graph = trace(model, {"input_ids": ids, "labels": ids})
    assert [op.target for op in graph.ops].count("aten.linalg_solve_triangular.default") == 2
    assert len(graph.ops) < 500  # over 1,000 with the loop
    assert file.is_torchdynamo_exporting is asked
