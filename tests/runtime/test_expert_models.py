"""Models of experts as a whole, trained on several processes: equal to one process."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

import meshwright as mw
from meshwright.codegen.lower.lower import lower
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.double import all_double
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import VOCAB, ModelCase, tokens
from meshwright.testing.spawn import run_ranks
from tests.codegen.quick import QUICK
from tests.traces import zoo_graph

FUSED = ("rms_norm", "rotary")
"""Kernels whose patterns both models write in ways of their own."""
MTP_SHARE = 0.3
"""Of the loss of the head that looks two tokens ahead."""


class TwoAhead(nn.Module):
    """DeepSeek-V3 with its second head: one more layer reads what the model made of a token and the
    token after it, and says the one after that."""

    def __init__(self) -> None:
        super().__init__()
        config = DeepseekV3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
            num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1,
            first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=32, routed_scaling_factor=2.5,
            norm_topk_prob=True, rope_interleave=True, experts_implementation="eager",
            attn_implementation="sdpa", tie_word_embeddings=False,
        )  # fmt: skip
        config.use_cache = False
        self.main = DeepseekV3ForCausalLM(config)
        self.of_hidden, self.of_token = (DeepseekV3RMSNorm(32) for _ in range(2))
        self.joined = nn.Linear(64, 32, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, 1)
        for parameter in self.layer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1)
        for name, buffer in self.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.linspace(-0.2, 0.2, 8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        base = self.main.model
        hidden = base(input_ids=input_ids).last_hidden_state
        ahead = base.embed_tokens(input_ids[:, 1:])
        both = torch.cat([self.of_hidden(hidden[:, :-1]), self.of_token(ahead)], -1)
        places = torch.arange(both.shape[1]).unsqueeze(0)
        made = self.joined(both)
        made = self.layer(made, position_embeddings=base.rotary_emb(made, places))
        first = self._loss(hidden[:, :-1], input_ids[:, 1:])
        second = self._loss(base.norm(made)[:, :-1], input_ids[:, 2:])
        return first + MTP_SHARE * second

    def _loss(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.main.lm_head(hidden).flatten(0, 1), wanted.flatten())


def _gpt_oss() -> nn.Module:
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, max_position_embeddings=32, experts_implementation="eager",
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.use_cache = False
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def _labelled(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = tokens(size, generator)
    return {"input_ids": ids, "labels": ids}


CASES = (
    (ModelCase("two_ahead", TwoAhead, lambda size, g: {"input_ids": tokens(size, g)}),
     [{"ep": 2, "tp": 2}]),
    (ModelCase("gpt_oss", _gpt_oss, _labelled), [{"tp": 2}]),
)  # fmt: skip
"""Models, and meshes that they are trained on."""


def _plan(graph: Graph, mesh: dict[str, int], *, beside: bool = False) -> Plan:
    """On this mesh, with everything split inside of blocks that can be. `beside`: tokens travel,
    and shared experts and gradients of weights are computed meanwhile."""
    problem = make_problem(graph, mw.Cluster.local(prod(mesh.values())), precision="fp64")
    axes = model_mesh(mesh)
    layouts = solve_layouts(graph, axes, usual(axes, QUICK), apart="ep" if beside else "")
    problem.keep_layouts(axes, "", layouts)
    plan = build_plan(problem, uniform_choice(problem, model=axes, num_microbatches=2))
    level = "block" if beside else "none"
    return replace(plan, stages=tuple(replace(stage, overlap=level) for stage in plan.stages))


def _in_pairs(graph: Graph) -> Plan:
    """Forwards and backwards run together, of stages that differ: dense layers first, the second
    head last."""
    problem = make_problem(graph, mw.Cluster.local(4), precision="fp64")
    axes = model_mesh({"ep": 2})
    problem.keep_layouts(axes, "", solve_layouts(graph, axes, usual(axes, QUICK), apart="ep"))
    chosen = uniform_choice(
        problem, pp=2, model=axes, num_microbatches=4, schedule="dual_pipe_v_pairs"
    )
    return build_plan(problem, chosen)


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "meshes"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_equal_to_one_process(case: ModelCase, meshes: list[dict[str, int]]) -> None:
    with all_double():
        graph = zoo_graph(case)
        assert sum(op.target == EXPERTS_TARGET for op in graph.ops) == 2
        plans = [_plan(graph, mesh) for mesh in meshes]
        plans += [_plan(graph, {"ep": 4}, beside=True) for mesh in meshes if "ep" in mesh]
        several = [_in_pairs(graph) for mesh in meshes if "ep" in mesh]
        assert all(len(paired_stages(plan)) == 4 for plan in several)
        fused = mw.trace(case.model(), case.example(), kernels=FUSED)
        assert {f.kernel for f in fused.fusions if f.places} == {*FUSED}
        pairs = [*((plan, graph) for plan in plans + several), (_plan(fused, meshes[0]), fused)]
        found = check_each_equal(case, pairs, steps=2)
        for plan in plans[len(meshes) :]:
            (program,) = lower(graph, plan, 0)
            cut = [call.code.halves for call in program.calls if call.code.halves]
            shared = [node.name for halves in cut for phase in halves.cuts[0].phases
                      if phase.moves and phase.beside for node in phase.beside.nodes]  # fmt: skip
            assert cut and all(len(halves.cuts) == 1 for halves in cut)
            assert sum("linear" in name for name in shared) >= 3, shared  # of a shared expert
    assert all(one.worst_of_both <= 1e-9 for one in found), found


def _in_8_bits(op: Op) -> Op:
    if op.target != EXPERTS_TARGET:
        return op
    form = f"{op.arg('form') or ''} narrow_tokens".strip()
    return replace(op, args=tuple({**dict(op.args), "form": form}.items()))


def _ends(plans: list[Plan], graph: Graph) -> list[dict[str, torch.Tensor]]:
    """Of a job of each plan, all parameters after two steps."""
    found = []
    for plan in plans:
        with all_double():
            model = CASES[0][0].model()
        job = compile_job(
            model, plan, optimizer="sgd", lr=0.1, device="cpu", check=False, graph=graph
        )
        for _ in range(2):
            job.step(CASES[0][0].example())
        found.append(full_state(job))
        job.close()
    return found


def test_tokens_in_8_bits_travel_so_beside_other_work_too() -> None:
    """Rounding once, as one process does, or on each way: the same numbers."""
    with all_double():
        graph = zoo_graph(CASES[0][0])
        narrow = replace(graph, ops=tuple(map(_in_8_bits, graph.ops)), fingerprint="narrow")
        plans = [_plan(narrow, {"ep": 4}), _plan(narrow, {"ep": 4}, beside=True)]
        wide = _plan(graph, {"ep": 4})
    plain = run_ranks(4, _ends, [wide], graph)[0][0]
    one, beside = run_ranks(4, _ends, plans, narrow)[0]
    for name, value in one.items():
        assert torch.allclose(beside[name], value, rtol=0, atol=1e-12), name
    assert max(float((plain[name] - one[name]).abs().max()) for name in one) > 1e-6
