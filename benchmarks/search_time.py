"""Wall time and peak memory of a search for full-size models, tracing apart.

python benchmarks/search_time.py [-o docs/results/search_time.md]
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from meshwright.ir.cluster import Cluster
from meshwright.ir.trace import trace
from meshwright.planner.search import search

CASES = {
    "GPT-2-XL on 64 H100": dict(
        config=("GPT2Config", dict(n_embd=1600, n_layer=48, n_head=25, n_positions=1024)),
        sequence=1024, batch=512, nodes=8,
    ),
    "Llama-3-70B on 512 H100": dict(
        config=("LlamaConfig", dict(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
            max_position_embeddings=8192,
        )),
        sequence=8192, batch=1024, nodes=64,
    ),
}  # fmt: skip


def run(name: str, searcher: str) -> str:
    """One case in this process; a row of the table."""
    case = CASES[name]
    config_name, settings = case["config"]
    config = getattr(transformers, config_name)(**settings, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(case["batch"], case["sequence"], dtype=torch.long)
    start = time.perf_counter()
    graph = trace(model, {"input_ids": ids, "labels": ids})
    traced = time.perf_counter()
    cluster = Cluster.preset("h100-sxm", num_nodes=case["nodes"], devices_per_node=8)
    plan = search(graph, cluster, searcher=searcher, progress=False)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    assert plan.predicted and plan.evidence
    stage = plan.stages[0]
    return (
        f"| {name} | {traced - start:.1f} | {end - traced:.1f} | {peak:.2f} | "
        f"{plan.evidence.candidates} | {plan.predicted.step_s:.2f} | {plan.evidence.gap:.1%} | "
        f"pp{len(plan.stages)} {stage.mesh} zero{stage.zero} x{plan.num_microbatches} "
        f"{plan.schedule.name} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--searcher", default="dp")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.case:
        print(run(options.case, options.searcher))
        return
    lines = [
        "| case | trace s | search s | peak GiB | candidates | predicted step s | gap | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in CASES:  # a process each, so that peak memory is the case's own
        command = [sys.executable, __file__, "--case", name, "--searcher", options.searcher]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines.append(done.stdout.strip().splitlines()[-1])
    print("\n".join(lines))
    if options.output:
        options.output.write_text("# Search time\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
