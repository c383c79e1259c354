"""What a precision holds on a rank, and which layouts fit because of it, by the user's own route.

python -m benchmarks.precisions [--rows 8b 70b 405b] [--limit 60]
python -m benchmarks.precisions --float8

Each row is a layout of NeMo's Llama 3.1 recipes that ran on H100 (`benchmarks/tables/dgxc.json`),
searched with its sizes pinned: the verdict of the memory model, and the step beside the measured
one. `--float8`: Llama 3.1 8B on 8 H100 as torchao's page has it (torchao/float8/README.md at
ef58bfb), in bfloat16 and with 8-bit products. Nothing is fitted to these rows.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem

PRECISIONS = ("bf16-autocast", "bf16", "bf16-sums")
_TABLE = Path(__file__).parent / "tables" / "dgxc.json"
_WORLDS = {"8b": 8, "70b": 128, "405b": 512}


@dataclass(frozen=True)
class NemoRow:
    """A layout and what it measured."""

    model: dict[str, Any]
    parallel: dict[str, Any]
    batch: dict[str, Any]
    devices: int
    measured_s: float

    @classmethod
    def of(cls, size: str) -> "NemoRow":
        """The row of a model on as many devices as `_WORLDS` says."""
        for row in json.loads(_TABLE.read_text())["rows"]:
            alike = row["model"]["name"] == f"Llama 3.1 {size}" and row["precision"] == "bf16"
            if alike and row["hardware"]["gpus"] == _WORLDS[size]:
                return cls(
                    row["model"], row["parallel"], row["batch"], row["hardware"]["gpus"],
                    row["measured"]["step_time_s"],
                )  # fmt: skip
        raise LookupError(f"{_TABLE} has no row of Llama 3.1 {size} on {_WORLDS[size]}")

    @property
    def pins(self) -> tuple[str, ...]:
        """The layout as a user asks for it."""
        p, b = self.parallel, self.batch
        counts = b["gbs"] // (b["mbs"] * p["dp"])
        found = [f"tp={p['tp']}", f"pp={p['pp']}", f"cp={p.get('cp', 1)}", f"dp_shard={p['dp']}",
                 f"zero={p['zero']}", f"num_microbatches={counts}", "recompute=none"]  # fmt: skip
        return tuple(found)

    def graph(self, precision: str) -> Graph:
        """The model at full size, without weights."""
        m = self.model
        config = LlamaConfig(
            num_hidden_layers=m["layers"], hidden_size=m["hidden"], intermediate_size=m["ffn"],
            num_attention_heads=m["heads"], num_key_value_heads=m["kv_heads"],
            vocab_size=m["vocab"], max_position_embeddings=self.batch["seq"], use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        ids = torch.zeros(2, self.batch["seq"], dtype=torch.int64)
        given = {"input_ids": ids, "labels": ids}
        return trace(model, given, global_batch_size=self.batch["gbs"], precision=precision)


def found(row: NemoRow, precision: str, limit_s: float) -> tuple[str, str, str]:
    """GiB on the fullest rank, seconds of a step with its error; or why there is no plan."""
    cluster = Cluster.preset("h100-sxm", num_nodes=row.devices // 8)
    graph = row.graph(precision)
    try:
        problem = make_problem(graph, cluster, constraints=row.pins, precision=precision)
        plan = search_problem(problem, time_limit_s=limit_s)
    except MeshwrightError as error:
        return "refused", "-", str(error)[:90]
    assert plan.predicted
    most = max(plan.predicted.stages, key=lambda stage: stage.memory.total_bytes).memory
    held = most.parameters_bytes + most.gradients_bytes + most.optimizer_bytes
    step_s = plan.predicted.step_s
    return (
        f"{most.total_bytes / 2**30:.1f}",
        f"{step_s:.2f} ({step_s / row.measured_s - 1:+.0%})",
        f"{held / 2**30:.1f} GiB of parameters, gradients and optimizer",
    )


_TORCHAO = {"bf16": 6150.0, "fp8-tensorwise": 7689.5, "fp8-rowwise": 6768.0}
"""Tokens per second and GPU there: compiled, FSDP2, one sequence of 8,192 a GPU, recompute by
operator; tensorwise gathers 8-bit parameters, ours gathers bfloat16."""


def float8(limit_s: float) -> Table:
    """Llama 3.1 8B in each precision."""
    table = Table("precision", "tokens/s and GPU", "measured", "times bf16", "measured")
    shape = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8,
             "vocab": 128256}  # fmt: skip
    row = NemoRow(shape, {}, {"gbs": 8, "seq": 8192}, 8, 0.0)
    pins = ("zero=3", "dp_shard=8", "num_microbatches=1", "saved=selective")
    known: list[float] = []
    for precision, measured in _TORCHAO.items():
        graph = row.graph(precision)
        problem = make_problem(
            graph, Cluster.preset("h100-sxm"), constraints=pins, precision=precision
        )
        plan = search_problem(problem, time_limit_s=limit_s)
        assert plan.predicted
        known.append(8192 / plan.predicted.step_s)
        table.add_row(
            precision, f"{known[-1]:.0f}", f"{measured:.0f}", f"{known[-1] / known[0]:.2f}",
            f"{measured / _TORCHAO['bf16']:.2f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Prints a table per row."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rows", nargs="+", default=list(_WORLDS), choices=list(_WORLDS))
    asked.add_argument("--limit", type=float, default=60.0, help="seconds of each search")
    asked.add_argument("--float8", action="store_true", help="torchao's rows")
    options = asked.parse_args()
    out = Console()
    if options.float8:
        out.print(float8(options.limit))
        return
    for size in options.rows:
        row = NemoRow.of(size)
        table = Table(
            "precision", "GiB on a rank of 80", f"step, s ({row.measured_s} measured)", "of it",
            title=f"Llama 3.1 {size} on {row.devices} H100: {', '.join(row.pins)}",
        )  # fmt: skip
        for precision in PRECISIONS:
            table.add_row(precision, *found(row, precision, options.limit))
        out.print(table)


if __name__ == "__main__":
    main()
