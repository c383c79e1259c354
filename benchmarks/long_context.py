"""Long samples at full size: our plan beside layouts that others train such models with.

python -m benchmarks.long_context [llama-3-70b-128k ...] [--seconds 20]

Models are traced without weights. A published layout is asked for by pins: the search completes
what these leave open, so that it is priced at its best, in the same cost model. Utilisation is of
the products of a forward and of half of the scores of causal attention, three times, by the peak
of bfloat16; nothing is fitted to it. NVIDIA counts all scores, causal or not.
"""

import time
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.printed import beside, print_models
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem


@dataclass(frozen=True, slots=True)
class Long:
    """A Llama, what it is trained on, and how others do."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    length: int
    """Tokens of a sample."""
    gpus: int
    batch: int
    """Samples in a step."""
    layout: tuple[str, ...]
    """Pins of a layout that others use."""
    source: str
    """Where that is from, with what was reached."""
    precision: str = "bf16"


_70B, _8B = (8192, 28672, 80, 64, 8, 128256), (4096, 14336, 32, 32, 8, 128256)
_7B = (4096, 11008, 32, 32, 32, 32000)
NEMO = "NeMo's long sequence performance, Llama-2-7B in FP8 on H100"
CASES = {
    "llama-3-70b-128k": Long(
        *_70B, 131072, 256, 32, ("tp=8", "cp=16"), "no figure of others was found"
    ),
    "llama-3-70b-128k-512": Long(
        *_70B, 131072, 512, 32, ("tp=8", "cp=16"), "no figure of others was found"
    ),
    "llama-3-8b-1m": Long(
        *_8B, 1048576, 256, 8, ("tp=8", "cp=16"), "NeMo, on 1,024 B200 in FP8: TP 4, CP 16"
    ),
    "llama-2-7b-128k": Long(
        *_7B, 131072, 128, 32, ("tp=4", "cp=4"), f"{NEMO}: 555 TFLOP/s", "fp8-tensorwise"
    ),
}


def traced(case: Long) -> Graph:
    """Returns the model's graph at its batch."""
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=case.inner,
        num_hidden_layers=case.layers, num_attention_heads=case.heads,
        num_key_value_heads=case.key_heads,
        max_position_embeddings=case.length, rope_theta=5e5,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, case.length, dtype=torch.int64)
    return trace(
        model,
        {"input_ids": ids, "labels": ids},
        global_batch_size=case.batch,
        precision=case.precision,
    )


def useful_flops(graph: Graph) -> float:
    """Returns those of a step: causal attention needs half of its scores."""
    return 3.0 * sum(
        op.flops / 2
        if classify(op.target) is OpClass.ATTENTION and op.arg("is_causal")
        else op.flops
        for op in graph.ops
    )


def row(name: str, seconds: float, preset: str, count: int, precision: str) -> str:
    """Returns what is found of a model: a line for ours and one for the other layout."""
    case = CASES[name]
    case = replace(case, precision=precision or case.precision)
    began = time.process_time()
    graph = traced(case)
    traced_s = time.process_time() - began
    gpus = count or case.gpus
    cluster = Cluster.preset(preset, num_nodes=gpus // 8)
    peak = cluster.types_of((0,))[0].peak("bfloat16") * gpus
    useful, whole = useful_flops(graph), 3.0 * sum(op.flops for op in graph.ops)

    def said(pins: tuple[str, ...]) -> tuple[str, float]:
        asked = tuple(parse_constraint(pin) for pin in pins)
        started = time.process_time()
        problem = make_problem(graph, cluster, precision=case.precision, constraints=asked)
        try:
            plan = search_problem(problem, time_limit_s=seconds, progress=False)
        except Infeasible as error:
            return f"no plan: {error}", 0.0
        assert plan.predicted
        took_s, step_s = time.process_time() - started, plan.predicted.step_s
        return (
            f"{name_of(plan)}: {step_s:.2f} s, {useful / peak / step_s:.1%}, "
            f"{whole / gpus / step_s / 1e12:.0f} TFLOP/s a GPU with all scores, "
            f"searched in {took_s:.1f} s"
        ), step_s

    title = f"{name} on {gpus} {preset}, traced in {traced_s:.1f} s of the processor"
    return beside(title, said, case.layout, case.source)


def main() -> None:
    """Print a row for each model."""
    print_models(__doc__, row, CASES)


if __name__ == "__main__":
    main()
