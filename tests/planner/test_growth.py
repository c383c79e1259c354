"""The search of a deep model does little more than that of a shallow one: few kinds of blocks."""

import cProfile
import pstats

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster import Cluster
from meshwright.ir.trace import trace
from meshwright.planner.search import search

GROWS = 1.35
"""Times as many function calls, at most, for four times the layers: longer pipelines are possible,
and the model's own ops are gone through a few times. It was 1.9 once."""


def calls(layers: int) -> int:
    """Function calls of a search."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, vocab_size=32000,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(64, 2048, dtype=torch.long)
    graph = trace(model, {"input_ids": ids, "labels": ids})
    cluster = Cluster.preset("h100-sxm", num_nodes=2)
    profile = cProfile.Profile()
    profile.runcall(search, graph, cluster, searcher="ilp", progress=False, time_limit_s=600)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_four_times_the_layers() -> None:
    calls(8)  # what is kept for the whole process
    few, many = calls(8), calls(32)
    assert many <= GROWS * few, f"{many / few:.2f} times as many calls"
