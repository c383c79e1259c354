"""Wall time and peak memory of a search for full-size models, tracing apart, and how both grow.

python -m benchmarks.search_time [-o docs/results/search_time.md]
"""

import argparse
import cProfile
import os
import pstats
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.search_time.growth import CPU_S, draw
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search


@dataclass(frozen=True)
class Case:
    """A model at its batch on nodes of 8 H100."""

    config: str
    settings: dict[str, Any] = field(repr=False)
    sequence: int
    batch: int
    nodes: int
    limit_s: float | None = None
    """What the search may take."""


LLAMA_70B = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
LLAMA = Case("LlamaConfig", LLAMA_70B, 8192, 1024, 64, 10)
CASES = {
    "GPT-2-XL on 64": Case(
        "GPT2Config", dict(n_embd=1600, n_layer=48, n_head=25, n_positions=1024), 1024, 512, 8, 5
    ),
    "Llama-3-70B on 512": LLAMA,
    "GPT-3 175B on 1,024": Case(
        "GPT2Config",
        dict(n_embd=12288, n_layer=96, n_head=96, n_positions=2048, vocab_size=51200),
        2048, 1536, 128, 10,
    ),
    "Mixtral-8x7B on 256": Case(
        "MixtralConfig",
        dict(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
            num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096,
        ),
        4096, 1024, 32, 10,
    ),
    "Llama-3-405B on 16,384": Case(
        "LlamaConfig",
        LLAMA_70B | dict(
            hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
            num_attention_heads=128,
        ),
        8192, 2048, 2048, 30,
    ),
}  # fmt: skip
GROWTH = {
    f"{layers} layers on {8 * nodes}": replace(
        LLAMA, settings=LLAMA_70B | dict(num_hidden_layers=layers), nodes=nodes, limit_s=None
    )
    for layers, nodes in ((20, 64), (40, 64), (80, 64), (80, 16), (80, 256))
}
"""The same layers and batch: fewer layers, then fewer and more devices."""
TURNS = 3


@dataclass(frozen=True)
class Taken:
    """What one search took."""

    traced_s: float
    wall_s: float
    cpu_s: float
    peak_gib: float
    rest: str
    """Candidates, step, gap and plan as columns."""


def model_of(case: Case) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch, on no device."""
    config = getattr(transformers, case.config)(**case.settings, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(case.batch, case.sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def cluster_of(case: Case) -> Cluster:
    return Cluster.preset("h100-sxm", num_nodes=case.nodes, devices_per_node=8)


def run(case: Case, searcher: str) -> Taken:
    """One case in this process."""
    model, batch = model_of(case)
    start = time.perf_counter()
    graph = trace(model, batch)
    traced, cpu = time.perf_counter(), time.process_time()
    plan = search(graph, cluster_of(case), searcher=searcher, progress=False, time_limit_s=600)
    end, cpu_s = time.perf_counter(), time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    assert plan.predicted and plan.evidence
    found = plan.evidence
    gap = "" if found.gap is None else f"{found.gap:.0%}"
    rest = f"{found.candidates} | {plan.predicted.step_s:.2f} | {gap} | {name_of(plan)}"
    return Taken(traced - start, end - traced, cpu_s, peak, rest)


def calls(case: Case, searcher: str) -> int:
    """Function calls of the search, which do not depend on how fast the machine is."""
    graph, profile = trace(*model_of(case)), cProfile.Profile()
    profile.runcall(
        search, graph, cluster_of(case), searcher=searcher, progress=False, time_limit_s=600
    )
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


HEAD = (
    "| case | trace s | search s | CPU s | limit s | peak GiB | candidates | step s | gap | plan |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def row(name: str, case: Case, took: Taken) -> str:
    limit = f"{case.limit_s:g}" if case.limit_s else ""
    return (
        f"| {name} | {took.traced_s:.1f} | {took.wall_s:.1f} | {took.cpu_s:.1f} | {limit} | "
        f"{took.peak_gib:.2f} | {took.rest} |"
    )


def rows(cases: dict[str, Case], searcher: str, turns: int = 1) -> dict[str, str]:
    """A process each, so that peak memory is the case's own; in turns, of which the middle counts:
    a machine's speed changes with time."""
    found: dict[str, list[str]] = {name: [] for name in cases}
    itself = [sys.executable, "-m", "benchmarks.search_time", "--searcher", searcher]
    for _ in range(turns):
        for name, lines in found.items():
            command = [*itself, "--case", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            lines.append(done.stdout.strip().splitlines()[-1])
            print(lines[-1], flush=True)
    return {name: sorted(lines, key=cpu_s)[turns // 2] for name, lines in found.items()}


def cpu_s(line: str) -> float:
    return float(line.split("|")[CPU_S])


def counted(searcher: str) -> str:
    """Function calls of a shallow and a deep model's search, each in its process."""
    found = []
    for name in ("20 layers on 512", "80 layers on 512"):
        command = [sys.executable, "-m", "benchmarks.search_time", "--searcher", searcher,
                   "--calls", "--case", name]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(int(done.stdout.split()[-1]))
    few, many = found
    return (
        f"Function calls, which do not vary: {few / 1e6:.2f} million with 20 layers, "
        f"{many / 1e6:.2f} million with 80: x{many / few:.2f}."
    )


def growth(found: dict[str, str]) -> str:
    """By how much the CPU time of a search grows."""
    took = {name: cpu_s(line) for name, line in found.items()}
    factors = [
        f"{what}: x{took[large] / took[small]:.2f}"
        for what, small, large in (
            ("four times the layers", "20 layers on 512", "80 layers on 512"),
            ("128 to 512 devices", "80 layers on 128", "80 layers on 512"),
            ("512 to 2,048 devices", "80 layers on 512", "80 layers on 2048"),
        )
    ]
    return f"CPU time of the search, {', '.join(factors)}. The goals are x1.3 and x2."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*CASES, *GROWTH])
    parser.add_argument("--searcher", default="ilp")
    parser.add_argument("--calls", action="store_true", help="count the case's function calls")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.case:
        case = (CASES | GROWTH)[options.case]
        if options.calls:
            print(calls(case, options.searcher))
            return
        print(row(options.case, case, run(case, options.searcher)))
        return
    text = [
        "# Search time", "",
        "`python -m benchmarks.search_time`: bf16, AdamW, H100 SXM nodes of 8, `searcher=\"ilp\"`, "
        "the whole space; a process each.",
        f"{date.today():%d %B %Y}, this machine: {os.cpu_count()} cores, no GPU. Predicted steps "
        "come from datasheet and fitted constants and were not checked on a device.",
        "", *HEAD, *rows(CASES, options.searcher).values(), "",
        "How the search of Llama-3-70B's layers grows with their number and with devices, the "
        f"middle of {TURNS} turns:", "",
        *HEAD, *(grown := rows(GROWTH, options.searcher, TURNS)).values(), "", growth(grown), "",
        counted(options.searcher),
    ]  # fmt: skip
    if options.output:
        picture = options.output.with_suffix(".png")
        draw(grown, picture)
        text += ["", f"![How the time of a search grows]({picture.name})"]
        options.output.write_text("\n".join(text) + "\n")
