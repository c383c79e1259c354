"""Mixtures of experts at full size: our plan beside the layout that was published for the model.

python -m benchmarks.mixtures [mixtral-8x22b ...] [--seconds 20] [--devices b200:512]
[--precision fp8-tensorwise]

Models are traced without weights. The published layout is asked for by pins: the search completes
what these leave open, so that it is priced at its best, in the same cost model. Utilisation is of
the products of a forward, three times, by the peak of bfloat16; nothing is fitted to it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.printed import beside, print_models
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem

LENGTH = 4096
PUBLISHED_ON = "h100-sxm"


@dataclass(frozen=True, slots=True)
class Mixture:
    """A model, what it was trained on, and how."""

    config: Callable[[], PretrainedConfig]
    gpus: int
    batch: int
    """Sequences of `LENGTH` tokens in a step."""
    published: tuple[str, ...]
    """Pins of the layout that its trainers name; none if nobody named one."""
    source: str
    """Where that is from, with the utilisation that was reached."""


def _mixtral() -> PretrainedConfig:
    return MixtralConfig(
        vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
        num_attention_heads=48, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def _qwen3() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip


def _gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128,
        num_experts_per_tok=4, sliding_window=128,
    )  # fmt: skip


def _maverick() -> PretrainedConfig:
    return Llama4TextConfig(
        vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2,
    )  # fmt: skip


def _kimi() -> PretrainedConfig:
    return DeepseekV3Config(
        vocab_size=163840, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        n_routed_experts=384, n_group=1, topk_group=1, num_experts_per_tok=8, n_shared_experts=1,
        first_k_dense_replace=1,
    )  # fmt: skip


BOTH = ("samples=own", "place *.experts.* ep=S(0)", "place *.experts.* tp=S(0)")
"""Of layouts whose ranks of tensor parallelism have other experts: `ep` times `tp` is their ep."""
ALONE = ("samples=own", "place *.experts.* ep=S(0)", "tp=1")

MIXTURES = {
    "gpt-oss-120b": Mixture(
        _gpt_oss,
        256,
        1024,
        ("pp=4", "ep=8", *ALONE),
        "Megatron-Bridge 26.04, 64 H100: PP 4, EP 8, 5,824 tokens/s/GPU, about 19 %",
    ),
    "llama-4-maverick": Mixture(
        _maverick,
        512,
        2048,
        ("pp=1", "tp=4", "ep=32", *BOTH),
        "dgxc-benchmarking 25.05, 512 H100: TP 4, EP 128, sequences of 8,192, 4.426 s, about 40 %",
    ),
    "mixtral-8x22b": Mixture(
        _mixtral,
        256,
        1024,
        ("pp=8", "tp=2", "ep=4", *BOTH),
        "arXiv 2504.14960 (Megatron-Core, 128 H100): TP 2, EP 8, PP 8, 49.3 %",
    ),
    "qwen3-235b-a22b": Mixture(
        _qwen3,
        256,
        1024,
        ("pp=8", "tp=2", "ep=16", *BOTH),
        "Megatron-Bridge 25.11, 256 H100: TP 2, EP 32, PP 8, 1,575 tokens/s/GPU in 8-bit floats",
    ),
    "deepseek-v3": Mixture(
        DeepseekV3Config,
        2048,
        4096,
        ("pp=16", "ep=64", *ALONE),
        "arXiv 2412.19437 (2,048 H800): PP 16, EP 64, ZeRO 1, no TP",
    ),
    "kimi-k2": Mixture(
        _kimi,
        256,
        512,
        ("pp=8", "ep=32", *ALONE),
        "NeMo AutoModel, 256 H100: PP 8, EP 32, 8.86 s, about 18 % with all recomputed",
    ),
}


def traced(mixture: Mixture, precision: str) -> Graph:
    """Returns the model's graph at its batch."""
    config = mixture.config()
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    return trace(model, inputs, global_batch_size=mixture.batch, precision=precision)


def found(problem: Problem, seconds: float) -> Plan | str:
    """Returns the best plan within a time limit by the clock, or why there is none: that nothing
    fits, or that a busy machine had not looked at anything by then."""
    try:
        return search_problem(problem, time_limit_s=seconds)
    except Infeasible as error:
        return str(error)


def row(name: str, seconds: float, preset: str, count: int, precision: str) -> str:
    """Returns what is found of a model, in one line and one for what was published."""
    mixture = MIXTURES[name]
    began = time.process_time()
    precision = precision or "bf16"
    graph = traced(mixture, precision)
    traced_s = time.process_time() - began
    gpus = count or mixture.gpus
    cluster = Cluster.preset(preset, num_nodes=gpus // 8)
    flops = 3 * sum(op.flops for op in graph.ops)
    peak = cluster.types_of((0,))[0].peak("bfloat16") * gpus

    def said(pins: tuple[str, ...]) -> tuple[str, float]:
        asked = tuple(parse_constraint(pin) for pin in pins)
        started = time.process_time()
        plan = found(make_problem(graph, cluster, precision=precision, constraints=asked), seconds)
        took_s = time.process_time() - started
        if isinstance(plan, str):
            return f"{plan}; searched in {took_s:.0f} s", 0.0
        assert plan.predicted
        step_s = plan.predicted.step_s
        share = flops / peak / step_s
        return f"{name_of(plan)}: {step_s:.2f} s, {share:.1%}, searched in {took_s:.0f} s", step_s

    title = f"{name} on {gpus} {preset}, traced in {traced_s:.0f} s"
    # What was published is of the case's own devices.
    pins = () if count or preset != PUBLISHED_ON else mixture.published
    return beside(title, said, pins, mixture.source)


def main() -> None:
    """Print a row for each model."""
    print_models(__doc__, row, MIXTURES)


if __name__ == "__main__":
    main()
