"""A small Llama, traced without weights."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace

WORDS, WIDTH, HIDDEN = 32000, 1024, 2816


@cache
def small_llama(precision: str = "bf16") -> Graph:
    """Four layers, 32 samples of 64 tokens."""
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    return trace(
        model, {"input_ids": ids, "labels": ids}, global_batch_size=32, precision=precision
    )
