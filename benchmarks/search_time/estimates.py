"""Times the estimate of one plan of Llama-3-70B on 512 H100, as run here and as Megatron runs it.

python -m benchmarks.search_time.estimates
"""

import time
from statistics import median

import torch
import transformers

from benchmarks.search_time.main import CASES
from meshwright.costmodel.estimate import estimate_all
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

CASE = CASES["Llama-3-70B on 512"]
LAYOUTS = ((8, 4, 16), (4, 8, 16), (8, 8, 8))
"""(tp, pp, replicas)"""
TURNS = 15


def main() -> None:
    """Prints milliseconds of processor time: with the tables of a search, and with none yet."""
    with torch.device("meta"):
        config = transformers.LlamaConfig(**CASE.settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, CASE.sequence, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    graph = trace(model, batch, global_batch_size=CASE.batch, precision="bf16")
    cluster = Cluster.preset("h100-sxm", num_nodes=CASE.nodes)
    for style in ("", "megatron"):
        problem = make_problem(graph, cluster, precision="bf16", style=style)
        for tp, pp, dp in LAYOUTS:
            choice = uniform_choice(
                problem, pp=pp, model=(("tp", tp),), variant="halves" if style else "",
                dp_shard=dp, dp_replicate=1, zero=1, num_microbatches=CASE.batch // dp,
            )  # fmt: skip
            plan = build_plan(problem, choice)
            took_s = []
            for _ in range(TURNS):
                start = time.process_time()
                estimate_all(problem.graph, cluster, plan, problem.tables)
                took_s.append(time.process_time() - start)
            start = time.process_time()
            estimate_all(problem.graph, cluster, plan)
            cold_s = time.process_time() - start
            print(
                f"{style or 'ours':8} tp{tp} pp{pp} dp{dp}: {1e3 * median(took_s):5.2f} ms, "
                f"least {1e3 * min(took_s):5.2f}; without tables {1e3 * cold_s:4.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
