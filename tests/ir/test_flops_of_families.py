"""Products counted in the traces of model families, against formulas from their configs."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from meshwright.ir.trace.trace import trace

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 512, 64, 160, 2, 4, 2, 256
SAMPLES, LENGTH = 2, 128
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": LENGTH, "use_cache": False,
}  # fmt: skip
# Widths of DeepSeek-V3's heads; ranks of its two narrow products are small.
Q_RANK, KV_RANK, ROPE, NOPE, VALUE = 24, 16, 64, 128, 128


def _counted(model: nn.Module) -> tuple[float, float]:
    """Flops of linear layers and of attention, forward."""
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    graph = trace(model, {"input_ids": tokens, "labels": tokens})
    linear = sum(op.flops for op in graph.ops if op.target == "aten.linear.default")
    attention = sum(op.flops for op in graph.ops if "attention" in op.target)
    return linear, attention


def _check(model: nn.Module, weights: int, score_and_value: int) -> None:
    """Two flops per weight and token, and per pair of tokens and width of a head's two products.

    Attention with a mask multiplies all pairs, whatever that leaves out; over a window those of a
    block, which so few tokens do not fill.
    """
    linear, attention = _counted(model)
    assert linear == 2 * SAMPLES * LENGTH * (LAYERS * weights + VOCABULARY * WIDTH)
    products = 2 * SAMPLES * LENGTH**2 * LAYERS * HEADS * score_and_value
    assert products <= attention <= 1.01 * products  # the rest is its softmax


@pytest.mark.parametrize(
    ("model", "config", "more", "matrices"),
    [
        (LlamaForCausalLM, LlamaConfig, {}, 3),
        (Qwen3ForCausalLM, Qwen3Config, {}, 3),
        (MistralForCausalLM, MistralConfig, {"sliding_window": 16}, 3),
        (Gemma3ForCausalLM, Gemma3TextConfig,
         {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, 3),
        (NemotronForCausalLM, NemotronConfig, {}, 2),  # squared activations have no gate
    ],
    ids=["llama", "qwen3", "mistral", "gemma3", "nemotron"],
)  # fmt: skip
def test_heads_wider_than_their_share(model: Any, config: Any, more: Any, matrices: int) -> None:
    """The width of a head is apart from hidden / heads: 256 where that is 16."""
    with torch.device("meta"):
        made = model(config(**CONFIG, head_dim=HEAD, **more))
    attention = 2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD
    _check(made, attention + matrices * WIDTH * INNER, 2 * HEAD)


def test_latent_attention() -> None:
    """Queries and keys of DeepSeek-V3 are wider than its values; layers here are dense."""
    config = DeepseekV3Config(
        **(CONFIG | {"num_key_value_heads": HEADS}), moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=LAYERS,
        q_lora_rank=Q_RANK, kv_lora_rank=KV_RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
    )  # fmt: skip
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    queries = WIDTH * Q_RANK + Q_RANK * HEADS * (NOPE + ROPE)
    keys = WIDTH * (KV_RANK + ROPE) + KV_RANK * HEADS * (NOPE + VALUE)
    weights = queries + keys + HEADS * VALUE * WIDTH + 3 * WIDTH * INNER
    _check(model, weights, NOPE + ROPE + VALUE)
