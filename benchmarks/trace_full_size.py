"""Traces Llama-3-70B and GPT-3-175B at full size without weights; prints time and peak memory.

    python benchmarks/trace_full_size.py [llama|gpt3]

The target is 30 s and 4 GiB on 2 cores. Each model runs in its own process.
"""

import resource
import subprocess
import sys
import time

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.ir.trace.trace import trace


def llama_70b() -> tuple[nn.Module, int]:
    """Llama-3-70B (Dubey et al. 2024, table 3) and its sequence length."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return LlamaForCausalLM(config), 8192


def gpt3_175b() -> tuple[nn.Module, int]:
    """GPT-3-175B (Brown et al. 2020, table 2.1), with dropout, and its sequence length."""
    config = GPT2Config(
        vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96,
        dtype=torch.bfloat16, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config), 2048


MODELS = {"llama": llama_70b, "gpt3": gpt3_175b}


def measure(name: str) -> None:
    """Build on the meta device, trace, and print one line."""
    started = time.perf_counter()
    with torch.device("meta"):
        model, length = MODELS[name]()
    built = time.perf_counter()
    ids = torch.zeros(1, length, dtype=torch.int64)
    graph = trace(model, {"input_ids": ids, "labels": ids})
    traced = time.perf_counter()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parameters = sum(p.numel for p in graph.parameters)
    flops = sum(op.flops for op in graph.ops)
    print(
        f"{name}: {parameters / 1e9:.1f}B parameters, {len(graph.ops)} ops, "
        f"{len(graph.blocks)} blocks of {len(list(graph.distinct_blocks()))} kinds, "
        f"{flops / 1e12:.0f} Tflop forward; built in {built - started:.1f} s, "
        f"traced in {traced - built:.1f} s, peak {peak_gib:.2f} GiB"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for model_name in MODELS:
            subprocess.run([sys.executable, __file__, model_name], check=True)
