"""A published run as a user of ours would ask for it: the model traced, the layout pinned, the
plan's own prediction.

The user's model is a Hugging Face model of the row's shape. What the row's stack does that a plan
does not say is a file of `ir/styles`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers

from benchmarks.published.measured import RowError
from benchmarks.published.recipes import recompute_mode
from benchmarks.published.rows import Row
from benchmarks.published.shapes import Shape
from benchmarks.published.sites import cluster_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.styles import style
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem

_ROOM = 8
"""Times the memory that a device has: a run that took place is priced where it does not fit by our
memory model too; the verdict on memory is given beside."""
_SUMS_HALF = ("fms-fsdp", "internevo")
"""Stacks that reduce gradients in half precision (fms_fsdp/policies/mixed_precision.py; InternEvo's
configs/7B_sft.py)."""
_SCHEDULES = {
    "": "one_f_one_b", "1f1b": "one_f_one_b", "onefoneb": "one_f_one_b",
    "interleaved": "interleaved", "interleaved1f1b": "interleaved", "gpipe": "gpipe",
    "zbv": "zbv", "zbvzerobubble": "zbv", "zb1p": "zero_bubble", "zerobubble": "zero_bubble",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """What a row's model is made of, besides its shape."""

    flash: bool = True
    dropout: float = 0.0
    squared: bool = False
    """Its activation is a squared ReLU."""


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a user gives."""

    graph: Graph
    cluster: Cluster
    pins: tuple[str, ...]
    precision: str
    style: str


def asked_of(row: Row, stack: str, model: Model) -> Asked:
    """RowError where the row has something that our plans have no word for."""
    precision = precision_of(row, stack)
    kernels = style(stack).kernels
    fused = kernels if isinstance(kernels, tuple) else (kernels,) if kernels != "none" else ()
    graph = _graph(row.shape, model, row.gbs, row.seq, precision, fused)
    return Asked(graph, cluster_of(row), pins_of(row, model.squared), precision, stack)


def plan_of(asked: Asked, *, limit_s: float = 60.0) -> Plan:
    """The plan with its prediction, on devices with more memory than they have."""
    roomy = tuple(
        replace(device, memory_bytes=_ROOM * device.memory_bytes)
        for device in asked.cluster.device_types
    )
    problem = make_problem(
        asked.graph, replace(asked.cluster, device_types=roomy), constraints=asked.pins,
        precision=asked.precision, as_style=asked.style,
    )  # fmt: skip
    return search_problem(problem, time_limit_s=limit_s)


def precision_of(row: Row, stack: str = "") -> str:
    """The precision of ours that a row's words mean."""
    words = row.precision.lower()
    if "fp8" in words or "float8" in words:
        return "fp8-rowwise" if "rowwise" in words else "fp8-tensorwise"
    if "throughout" in words or stack in _SUMS_HALF:
        return "bf16-sums"
    if "fp16" in words:
        return "fp16"
    return "bf16"


def pins_of(row: Row, squared: bool = False) -> tuple[str, ...]:
    """The layout as a user pins it."""
    p = row.parallel
    line = p.dp
    shard = min(p.shard, line) if p.zero else 1
    if p.ep > 1 or row.shape.experts:
        raise RowError("experts")
    if row.gbs % (row.mbs * p.dp):
        raise RowError(f"{row.gbs} samples are not whole micro-batches of {row.mbs} x {p.dp}")
    mode, every = recompute_mode(row.recompute)
    if every > 1:
        raise RowError(f"recompute {row.recompute!r}")
    layers = "model.layers.*" if row.shape.gated or squared else "transformer.h.*"
    kept = {"none": ("recompute=none", "saved=none"), "full": (f"block {layers} recompute=full",)}
    kept = kept.get(mode, ("recompute=none", "saved=selective"))
    pins = [
        f"tp={p.tp}", f"pp={p.pp}", f"cp={p.cp}", f"dp_shard={shard}",
        f"dp_replicate={line // shard}", f"zero={p.zero if shard > 1 else 0}",
        f"num_microbatches={row.microbatches}", *kept,
    ]  # fmt: skip
    if p.pp > 1:
        named = p.schedule.lower().replace("_", "").replace("-", "")
        if named not in _SCHEDULES:
            raise RowError(f"schedule {p.schedule!r}")
        pins.append(f"schedule={'interleaved' if p.vpp > 1 else _SCHEDULES[named]}")
    return tuple(pins)


@lru_cache(maxsize=2)
def _graph(
    shape: Shape, model: Model, batch: int, seq: int, precision: str, kernels: tuple[str, ...]
) -> Graph:
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            _config(shape, model, seq), attn_implementation="sdpa" if model.flash else "eager"
        )
        ids = torch.zeros(2, seq, dtype=torch.long)
    return trace(
        made, {"input_ids": ids, "labels": ids}, global_batch_size=batch, precision=precision,
        kernels=kernels,
    )  # fmt: skip


def _config(shape: Shape, model: Model, seq: int) -> Any:
    common = {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "use_cache": False}
    if shape.gated or model.squared:
        kind = transformers.LlamaConfig if shape.gated else transformers.NemotronConfig
        return kind(
            hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.ffn, max_position_embeddings=seq, **common,
        )  # fmt: skip
    p = model.dropout
    return transformers.GPT2Config(
        n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_inner=shape.ffn,
        n_positions=seq, activation_function="gelu_pytorch_tanh", attn_pdrop=p, resid_pdrop=p, embd_pdrop=p, **common,
    )  # fmt: skip
