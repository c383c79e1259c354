"""What published runs recompute of their layers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.published.recipes import core, per_op
from meshwright.ir.trace.trace import trace
from meshwright.testing.models import CASES
from tests.styles.small_llama import small_llama
from tests.traces import zoo_graph


def test_parts_of_layers_that_published_runs_recompute():
    graph = small_llama()
    block = next(b for b in graph.blocks if "*" in b.pattern)
    kept = per_op(graph, block)
    products = [op.key for op in graph.block_ops(block) if op.target == "aten.linear.default"]
    assert [key.split("/")[0].rpartition(".")[2] for key in products if key in kept] == [
        "k_proj", "o_proj", "up_proj",
    ]  # fmt: skip
    assert all(f"{key}<" in kept for key in products)
    assert core(graph, block) == {}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, attn_implementation="eager"))
        ids = torch.zeros(2, 64, dtype=torch.long)
    written = trace(model, {"input_ids": ids, "labels": ids}, global_batch_size=8)
    layer = next(b for b in written.blocks if "*" in b.pattern)
    again = [key.rpartition("/")[2] for key in core(written, layer)]
    assert again[0] == "matmul" and again[-1] == "matmul#2" and "softmax" in again
    assert not any("c_proj" in key or "c_attn" in key for key in core(written, layer))
    case = CASES["mixtral"]  # the softmax of a router is none of attention
    mixture = zoo_graph(case)
    routed = next(b for b in mixture.blocks if "*" in b.pattern)
    assert sum("softmax" in op.target for op in mixture.block_ops(routed)) == 1
    assert core(mixture, routed) == {}
