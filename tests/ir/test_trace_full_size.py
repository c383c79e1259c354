"""Real widths without weights: time near-linear in depth, memory next to none."""

import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace


def _llama_3_70b(layers: int) -> Graph:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
            num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
            dtype=torch.bfloat16,
        ))  # fmt: skip
    return trace(model, global_batch_size=1024)


def test_llama_at_full_width() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    graph = _llama_3_70b(20)
    seconds = time.process_time() - started
    grown_gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert len(graph.blocks) == 22 and len(list(graph.distinct_blocks())) == 3
    assert graph.tensors[graph.inputs[0]].shape == (1024, 8192)
    # A quarter of the depth in a quarter of the 30 s, and far from the 4 GiB.
    assert seconds < 7.5
    assert grown_gib < 1
    # Kaplan et al. 2020: 2 flops per parameter and token, besides attention and embedding.
    tokens = 1024 * 8192
    used = sum(p.numel for p in graph.parameters) - 128256 * 8192
    products = sum(op.flops for op in graph.ops if op.target == "aten.linear.default")
    assert products == 2 * tokens * (used - 41 * 8192)  # all but the 41 norms
