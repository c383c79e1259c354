"""Which parallelism our planner takes when: models x clusters, and what changes a choice.

python -m benchmarks.which_parallelism [-o docs/results/which_parallelism.md] [--time-limit 30]

Models are only inspected; all figures are predictions from data sheets. The page has a picture
beside it. A row is one search.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.ir.text.units import size
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search

TOKENS = 2**22
"""Of a global batch, where a row says nothing else: 4 Mi, as large models are trained."""
MODELS: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
             "num_attention_heads": 128, "num_key_value_heads": 8},
}  # fmt: skip
"""Llama 3 (Dubey et al. 2024, table 3; the 1B is Llama 3.2)."""


@dataclass(frozen=True)
class Row:
    """One search."""

    model: str
    device: str
    nodes: int
    per_node: int = 8
    seq: int = 8192
    tokens: int = TOKENS
    network: str | None = None
    pins: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """The machines of the row."""
        made: dict[str, Any] = {"num_nodes": self.nodes, "devices_per_node": self.per_node}
        return Cluster.preset(self.device, network=self.network, **made)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.tokens // self.seq


GRID = tuple(Row(model, "h100-sxm", nodes) for model in MODELS for nodes in (1, 8, 64))
CHANGES = {
    "less memory": Row("8B", "a100-40", 1),
    "a slow network": Row("8B", "h100-sxm", 8, network="ethernet-25g"),
    "no fast links in a node": Row("8B", "l40s", 8),
    "32k tokens a sample": Row("8B", "h100-sxm", 8, seq=32768),
    "128k tokens a sample": Row("8B", "h100-sxm", 8, seq=131072),
    "a batch of 64 samples": Row("8B", "h100-sxm", 8, tokens=64 * 8192),
    "a batch of 64 samples, 512 GPUs": Row("8B", "h100-sxm", 64, tokens=64 * 8192),
}
"""What is changed -> the row; each beside the same row of the grid, if there is one."""


@dataclass(frozen=True)
class Found:
    """What a search took, or why it took nothing."""

    row: Row
    plan: Plan | None
    why: str
    search_s: float
    flops: float = field(default=0.0)

    @property
    def of_peak(self) -> float:
        """Operations of the model, without recomputation, over the peak of all devices."""
        assert self.plan and self.plan.predicted
        cluster = self.row.cluster
        peak = cluster.device_types[0].peak("bfloat16") * cluster.num_devices
        return self.flops / self.plan.predicted.step_s / peak


@lru_cache(maxsize=1)
def graph_of(model: str, seq: int, batch: int) -> Graph:
    """Traced without memory."""
    config = LlamaConfig(**MODELS[model], vocab_size=128256, max_position_embeddings=seq)
    with torch.device("meta"):
        built = LlamaForCausalLM(config)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    return trace(built, {"input_ids": ids, "labels": ids}, precision="bf16")


def found_for(row: Row, time_limit_s: float) -> Found:
    """Searches for a row."""
    graph = graph_of(row.model, row.seq, row.batch)
    begun = time.perf_counter()
    try:
        plan = search(
            graph, row.cluster, time_limit_s=time_limit_s, progress=False, constraints=row.pins
        )
    except Infeasible as error:
        return Found(row, None, str(error), time.perf_counter() - begun)
    flops = 3 * sum(op.flops for op in graph.ops)
    return Found(row, plan, "", time.perf_counter() - begun, flops)


def _cells(found: Found) -> Iterator[str]:
    row, plan = found.row, found.plan
    yield f"{row.model}, {row.nodes * row.per_node} {row.device}"
    if plan is None:
        yield from ("none fits", "", "", "", f"{found.search_s:.0f}")
        return
    assert plan.predicted
    next_best = next(iter(plan.evidence.alternatives), None) if plan.evidence else None
    yield f"`{name_of(plan)}`"
    yield f"{seconds(plan.predicted.step_s)}, {found.of_peak:.0%}"
    yield size(plan.predicted.peak_bytes)
    yield f"`{next_best.name}`: {next_best.why}" if next_best else ""
    yield f"{found.search_s:.0f}"


HEAD = ("model, cluster", "plan", "step, share of peak", "memory", "the next best, and why not",
        "search, s")  # fmt: skip


def table(rows: Sequence[tuple[str, ...]], head: Sequence[str]) -> str:
    """In Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TEXT = """\
# Which parallelism our planner takes

{day}, `python -m benchmarks.which_parallelism`, 2-core CPU machine. Llama 3 at 8,192 tokens a
sample and 4 Mi tokens a batch, bf16 with AdamW, a tenth of memory free. Predictions from data
sheets: nothing here was run. `shard` is data parallelism whose state is split (ZeRO), `dp` replicas
of it, `x4` four micro-batches.

![What each axis is, by model and cluster](which_parallelism.png)

## Models and clusters

{grid}

## What changes the choice

Llama-8B on 64 H100 again, with one thing changed.

{changes}
"""
AXES = ("dp", "tp", "cp", "pp")


def sizes(plan: Plan) -> dict[str, int]:
    """How many ranks each axis has, in the first stage."""
    mesh = plan.stages[0].mesh
    tensor = [mesh.get(axis, 1) for axis in ("tp", "tp_depth", "tp_row", "tp_col")]
    return {
        "dp": mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1),
        "tp": tensor[0] * tensor[1] * tensor[2] * tensor[3],
        "cp": mesh.get("cp", 1),
        "pp": len(plan.schedule.rows),
    }


def draw(grid: Sequence[Found], path: Path) -> None:
    """A cell for each model and cluster, a bar for each axis."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models, nodes = list(MODELS), sorted({found.row.nodes for found in grid})
    figure, cells = pyplot.subplots(
        len(models), len(nodes), figsize=(9, 7), sharex=True, sharey=True, layout="constrained"
    )
    colors = ("#3366aa", "#cc7722", "#558844", "#884488")
    for found in grid:
        axes = cells[models.index(found.row.model)][nodes.index(found.row.nodes)]
        axes.set_ylim(-0.5, len(AXES) - 0.5)
        axes.invert_yaxis()
        axes.set_xlim(0, 10.5)
        axes.set_xticks([])
        axes.set_yticks(range(len(AXES)), AXES)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        if found.plan is None:
            axes.text(0.3, 1.5, "does not fit", va="center", fontsize=11)
            continue
        for place, count in enumerate(sizes(found.plan).values()):
            axes.barh(place, log2(count), color=colors[place])
            axes.text(log2(count) + 0.2, place, str(count), va="center", fontsize=10)
    for place, count in enumerate(nodes):
        cells[0][place].set_title(f"{8 * count} H100")
    for place, model in enumerate(models):
        cells[place][0].set_ylabel(f"Llama {model}", fontsize=11)
    figure.suptitle("Ranks on each axis of the fastest plan")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--time-limit", type=float, default=30)
    options = parser.parse_args()

    def looked(row: Row) -> Found:
        found = found_for(row, options.time_limit)
        print(" | ".join(_cells(found)), file=sys.stderr, flush=True)
        return found

    grid = [looked(row) for row in GRID]
    changed = {what: looked(row) for what, row in CHANGES.items()}
    usual = next(x for x in grid if (x.row.model, x.row.nodes) == ("8B", 8))
    rows = [("nothing", *_cells(usual)), *((what, *_cells(x)) for what, x in changed.items())]
    text = TEXT.format(
        day=date.today().isoformat(), grid=table([tuple(_cells(x)) for x in grid], HEAD),
        changes=table(rows, ("changed", *HEAD)),
    )  # fmt: skip
    if options.output:
        options.output.write_text(text)
        draw(grid, options.output.with_suffix(".png"))
    else:
        print(text)


if __name__ == "__main__":
    main()
