"""A plan as Megatron's users write them, and one that no other tool has words for."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

CLUSTER = Cluster.preset("a100-80", num_nodes=2, devices_per_node=8)
CONFIG = SimpleNamespace(
    model_type="gpt2", hidden_size=64, num_attention_heads=4, max_position_embeddings=32,
    tie_word_embeddings=True,
)  # fmt: skip


@cache
def graph() -> Graph:
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=32, vocab_size=64,
                        bos_token_id=0, eos_token_id=0, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    return trace(model, global_batch_size=32)


def _plan(**asked: object) -> Plan:
    problem = make_problem(graph(), CLUSTER, precision="bf16-autocast")
    choice = uniform_choice(problem, **asked)  # type: ignore[arg-type]
    return rehash(build_plan(problem, choice, predict=False))


@cache
def uniform() -> Plan:
    """2 stages x 2 replicas in shards x 4 ways of tensor parallelism, sequences split between
    layers; whatever the planner would choose."""
    plan = _plan(pp=2, dp_shard=2, tp=4, zero=1, num_microbatches=4, recompute="full")
    split = ({"dp": "S(0)", "tp": "S(1)"},)
    layouts = tuple(replace(x, inputs=split) if "*" in x.pattern else x for x in plan.layouts)
    return rehash(replace(plan, layouts=layouts))


@cache
def replicas() -> Plan:
    """4 x 4 replicas, parameters in shards."""
    return _plan(dp_replicate=4, dp_shard=4, zero=3, num_microbatches=2)


@cache
def looped() -> Plan:
    """Two parts of the model on each of two ranks of a pipeline."""
    return _plan(pp=2, dp_shard=8, zero=1, num_microbatches=4, schedule="interleaved")


@cache
def odd() -> Plan:
    """Stages of 12 and 4 replicas, with shares of their own."""
    plan = _plan(pp=2, stage_dp=(12, 4), num_microbatches=2, schedule="gpipe")
    first = replace(plan.stages[0], recompute={"transformer.h.1": "full"})
    return rehash(replace(plan, stages=(first, *plan.stages[1:]), optimizer="rmsprop"))
