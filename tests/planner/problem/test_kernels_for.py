"""Which fused kernels are put in where nobody says: those that pay on the devices at hand."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.styles import style
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.search.search import search
from tests.planner.problems import mlp

LENGTH, WORDS = 64, 512


def _gpt2(width: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def _llama(width: int) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        use_cache=False, pad_token_id=0, bos_token_id=0, eos_token_id=1,
    ))  # fmt: skip


CPU, GPU = Cluster.local(2), Cluster.preset("h100-sxm", devices_per_node=2)
CASES = [
    (_gpt2, CPU, {"gelu"}),
    (_llama, CPU, set()),
    (_gpt2, GPU, {"gelu", "bias_gelu", "layer_norm", "cross_entropy"}),
    (_llama, GPU, {"rms_norm", "swiglu", "rotary", "cross_entropy"}),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("build", "cluster", "wanted"), CASES)
def test_those_that_pay_on_the_devices(build, cluster, wanted, precision):
    """On a CPU fused operators call torch's one by one, from Python: thread time says that they
    take longer, all but GELU by tanh, which is torch's own."""
    names, wins = kernels_for([cluster])
    with torch.device("meta"):
        model, ids = build(256), torch.zeros(4, LENGTH, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    graph = trace(model, given, precision=precision, kernels=names, wins=wins)
    assert {fusion.kernel for fusion in graph.fusions if fusion.places} == wanted


def test_a_style_has_its_own_and_what_is_asked_goes_first():
    names, wins = kernels_for([GPU], stack="megatron")
    assert (set(names), wins) == (set(style("megatron").kernels), None)
    assert kernels_for([GPU], "none", "megatron") == ((), None)
    names, wins = kernels_for([GPU], "rotary,swiglu")
    assert (set(names), wins) == ({"rotary", "swiglu"}, None)


def test_a_graph_keeps_what_it_has():
    graph = mlp()
    assert search(graph, CPU, progress=False, time_limit_s=5).kernels == ()
    with pytest.raises(PlanError, match="while a model is traced"):
        search(graph, CPU, kernels="auto", progress=False)
