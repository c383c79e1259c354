"""Long samples at full size: our plan beside layouts that others train such models with.

python -m benchmarks.long_context [llama-3-70b-128k ...] [--seconds 20]

Models are traced without weights. A published layout is asked for by pins: the search completes
what these leave open, so that it is priced at its best, in the same cost model. Utilisation is of
the products of a forward and of half of the scores of causal attention, three times, by the peak
of bfloat16; nothing is fitted to it.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.mixtures import found
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.plan_comparison import name_of

VOCABULARY = 128256


@dataclass(frozen=True, slots=True)
class Long:
    """A Llama 3, what it is trained on, and how others do."""

    hidden: int
    inner: int
    layers: int
    heads: int
    length: int
    """Tokens of a sample."""
    gpus: int
    batch: int
    """Samples in a step."""
    layouts: tuple[tuple[str, ...], ...]
    """Pins of layouts that others use, first of those that stand beside ours."""
    source: str


MEGATRON, ULYSSES = ("tp=8", "cp=16"), ("tp=1", "cp=8", "zero=3")
CASES = {
    "llama-3-70b-128k": Long(
        8192, 28672, 80, 64, 131072, 256, 32, (MEGATRON,), "",
    ),
    "llama-3-70b-128k-512": Long(
        8192, 28672, 80, 64, 131072, 512, 32, (MEGATRON,), "",
    ),
    "llama-3-8b-1m": Long(4096, 14336, 32, 32, 1048576, 256, 8, (("tp=8", "cp=16"),), ""),
}  # fmt: skip


def traced(case: Long) -> Graph:
    """Returns the model's graph at its batch."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=case.hidden, intermediate_size=case.inner,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=8,
        max_position_embeddings=case.length, rope_theta=5e5,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, case.length, dtype=torch.int64)
    return trace(
        model, {"input_ids": ids, "labels": ids}, global_batch_size=case.batch, precision="bf16"
    )


def useful_flops(graph: Graph) -> float:
    """Returns those of a step: causal attention needs half of its scores."""
    return 3.0 * sum(
        op.flops / 2
        if classify(op.target) is OpClass.ATTENTION and op.arg("is_causal")
        else op.flops
        for op in graph.ops
    )


def row(name: str, seconds: float) -> str:
    """Returns what is found of a model, a line for ours and one for each published layout."""
    case = CASES[name]
    began = time.process_time()
    graph = traced(case)
    traced_s = time.process_time() - began
    cluster = Cluster.preset("h100-sxm", num_nodes=case.gpus // 8)
    peak = cluster.types_of((0,))[0].peak("bfloat16") * case.gpus

    def said(pins: tuple[str, ...]) -> tuple[str, float]:
        asked = tuple(parse_constraint(pin) for pin in pins)
        started = time.process_time()
        plan: Plan | None = found(
            make_problem(graph, cluster, precision="bf16", constraints=asked), seconds
        )
        took_s = time.process_time() - started
        if plan is None or plan.predicted is None:
            return f"no plan fits, searched in {took_s:.0f} s", 0.0
        step_s = plan.predicted.step_s
        share = useful_flops(graph) / peak / step_s
        return f"{name_of(plan)}: {step_s:.2f} s, {share:.1%}, searched in {took_s:.0f} s", step_s

    ours, ours_s = said(())
    lines = [f"{name} on {case.gpus} H100, traced in {traced_s:.0f} s", f"  ours: {ours}"]
    for pins in case.layouts:
        theirs, theirs_s = said(pins)
        ratio = f", ours takes {ours_s / theirs_s:.2f} of that" if ours_s and theirs_s else ""
        lines.append(f"  {' '.join(pins)}: {theirs}{ratio}")
    return "\n".join([*lines, f"  ({case.source})"])


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    for name in asked.models or CASES:
        print(row(name, asked.seconds), flush=True)


if __name__ == "__main__":
    main()
