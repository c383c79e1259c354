"""Models that go over tokens or chunks, trained on several processes: equal to one process."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

import meshwright as mw
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.double import all_double
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import VOCAB, ModelCase
from tests.codegen.quick import QUICK
from tests.traces import zoo_graph

RECURRENCE, SOLVE = "meshwright.recurrence.default", "aten.linalg_solve_triangular.default"


def _mamba() -> nn.Module:
    """Steps are tokens, and channels are split."""
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4,
            use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _kimi() -> nn.Module:
    """Steps are chunks of 64 tokens, and heads are split."""
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=4, num_local_experts=2, num_experts_per_token=1,
            moe_intermediate_size=8, linear_num_heads=2, linear_head_dim=4, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, experts_implementation="eager", use_cache=False,
            layer_types=["linear_attention", "full_attention"],
        )
    )  # fmt: skip


def _minimax() -> nn.Module:
    """Steps are blocks of 4 tokens, of which the last is shorter and no step; decays are buffers of
    the module."""
    return MiniMaxForCausalLM(
        MiniMaxConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=2,
            num_experts_per_tok=1, block_size=4, layer_types=["linear_attention", "full_attention"],
            pad_token_id=0, bos_token_id=1, eos_token_id=2, experts_implementation="eager",
            use_cache=False,
        )
    )  # fmt: skip


def _xlstm() -> nn.Module:
    """Steps are chunks, whose states are left in places of a tensor."""
    return xLSTMForCausalLM(
        xLSTMConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_blocks=2, num_heads=2,
            chunk_size=16, mode="train", return_last_states=True, use_cache=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _any_xlstm() -> nn.Module:
    """As its config is by default: whole chunks first, then the rest token by token, in a loop that
    calls a function."""
    return xLSTMForCausalLM(
        xLSTMConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_blocks=2, num_heads=2,
            chunk_size=16, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


class _Balanced(nn.Module):
    """Steps are no tokens: rows and columns of mixing matrices are normed in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            mixed = layer(x).view(*x.shape[:2], 4, 4).exp()
            for _ in range(20):
                mixed = mixed / (mixed.sum(-1, keepdim=True) + 1e-3)
                mixed = mixed / (mixed.sum(-2, keepdim=True) + 1e-3)
            x = x + mixed.flatten(2)
        return x.square().mean()


def _drawn(length: int) -> Any:
    def draw(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCAB, (size, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return draw


def _values(size: int, generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(size, 3, 16, generator=generator),)


CASES = (
    (ModelCase("mamba", _mamba, _drawn(6), batch_size=4), 2, 0),
    (
        ModelCase("balanced", _Balanced, lambda size, g: (torch.randn(size, 3, 16, generator=g),)),
        4,
        0,
    ),
    (ModelCase("kimi", _kimi, _drawn(200), batch_size=2), 1, 1),
    (ModelCase("minimax", _minimax, _drawn(18), batch_size=4), 1, 0),
    (ModelCase("xlstm", _xlstm, _drawn(64), batch_size=4), 2, 0),
    (ModelCase("xlstm-rest", _any_xlstm, _drawn(69), batch_size=4), 4, 0),
)
"""Models, how many recurrences they have, and how many triangular systems."""


def _plans(graph: Graph) -> list[Plan]:
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    axes = model_mesh({"tp": 2})
    problem.keep_layouts(axes, "", solve_layouts(graph, axes, usual(axes, QUICK)))
    choices = (
        {"dp_shard": 2, "zero": 2}, {"model": axes}, {"pp": 2, "num_microbatches": 2},
    )  # fmt: skip
    return [build_plan(problem, uniform_choice(problem, **choice)) for choice in choices]


@pytest.mark.parametrize(("case", "steps", "systems"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_equal_to_one_process(case: ModelCase, steps: int, systems: int) -> None:
    with all_double():
        graph = zoo_graph(case)
        targets = [op.target for op in graph.ops]
        assert (targets.count(RECURRENCE), targets.count(SOLVE)) == (steps, systems)
        plans = _plans(graph)
        keys = {op.key for op in graph.ops if op.target in (RECURRENCE, SOLVE)}
        ops = [layout.ops for layout in plans[1].layouts]
        said = [each[key].get("tp", "") for each in ops for key in keys & each.keys()]
        assert said and all("-> S(" in strategy for strategy in said), said
        found = check_each_equal(case, [(plan, graph) for plan in plans], steps=2)
    assert all(one.worst_of_both <= 1e-9 for one in found), found
