"""Our plans against the layouts that experts published for real clusters, in our cost model.

python -m benchmarks.experts REPORT_DIR [-o docs/results/experts.md] [--per-table 4]

REPORT_DIR holds the published tables (`megatron_sc21_table1.json` and others). For every row the
model is traced at its sizes and batch; the published layout and what our search finds are priced
with the same tables. Nothing is fitted to the rows.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from statistics import median
from textwrap import fill

import torch
import transformers

from benchmarks.published.measured import RowError
from benchmarks.published.model_kinds import ModelKind, config_of
from benchmarks.published.recipes import recompute_mode
from benchmarks.published.route import schedule_of
from benchmarks.published.rows import Row, tables
from benchmarks.published.shapes import Shape
from benchmarks.published.sites import cluster_of
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import block_flops, build_plan, even_cuts, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem

WHOLE = "megatron_sc21_table1"
"""The table of which every row is taken; of the others a few, evenly spaced."""
ROUNDING = 5e-4
"""Of ratios."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with the expert's plan and ours."""

    row: Row
    expert: Plan
    excess_bytes: int
    """By which the expert's plan does not fit, in our cost model."""
    ours: Plan
    search_s: float

    @property
    def ratio(self) -> float:
        """Our predicted step over the expert's."""
        return _step_s(self.ours) / _step_s(self.expert)


def _step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def lacks(row: Row) -> str:
    """Why a row is left out; empty if it is not."""
    words = row.precision.lower()
    reasons = {
        "no step time": not row.step_s,
        "8-bit floats": "float8" in words or "fp8" in words,
        "context parallel": row.parallel.cp > 1,
        "experts": bool(row.shape.experts) or row.parallel.ep > 1,
        "one device": row.gpus == 1,
        "an odd batch": bool(row.gbs % (row.mbs * row.parallel.dp)),
    }
    return next((name for name, holds in reasons.items() if holds), "")


def sample(rows: Sequence[Row], count: int) -> tuple[Row, ...]:
    """Rows evenly spaced, the first and the last included."""
    if len(rows) <= count:
        return tuple(rows)
    last = max(1, count - 1)
    return tuple(rows[round(i * (len(rows) - 1) / last)] for i in range(count))


@lru_cache(maxsize=1)
def graph_of(shape: Shape, batch: int, seq: int) -> Graph:
    """The model traced on no memory: GPT-2 or Llama, with flash attention."""
    # GPT-2 as Hugging Face has it by default.
    kind = ModelKind(shape=shape, dropout=0.0 if shape.gated else 0.1, activation="gelu_new")
    config = config_of(kind, seq)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    return trace(model, {"input_ids": ids, "labels": ids})


def expert_plan(problem: Problem, row: Row) -> Plan:
    """The published layout as a plan of ours."""
    p = row.parallel
    schedule = schedule_of(row)
    shard = min(p.shard, p.dp)
    choice = uniform_choice(
        problem, pp=p.pp, tp=p.tp, dp_shard=shard, dp_replicate=p.dp // shard,
        zero=p.zero if shard > 1 else 0, num_microbatches=row.microbatches,
        schedule=schedule,
        recompute="full" if recompute_mode(row.recompute)[0] == "full" else "none",
        cuts=even_cuts(block_flops(problem.graph), p.pp * p.vpp),
    )  # fmt: skip
    return build_plan(problem, choice)


def compare(row: Row, searcher: str) -> Compared:
    """RowError or PlanError where the expert's layout is none of ours."""
    graph = graph_of(row.shape, row.gbs, row.seq)
    problem = make_problem(graph, cluster_of(row), precision="bf16-autocast")
    expert = expert_plan(problem, row)
    begun = time.perf_counter()
    ours = search_problem(problem, searcher, time_limit_s=600)
    taken_s = time.perf_counter() - begun
    return Compared(row, expert, excess_bytes(problem, expert), ours, taken_s)


def rows_of(folder: Path, per_table: int) -> Iterator[Row]:
    """The rows that are compared."""
    for table in tables(folder):
        usable = [row for row in table.rows if not lacks(row)]
        yield from usable if table.name == WHOLE else sample(usable, per_table)


def line(found: Compared) -> str:
    """A row of the report."""
    row, fits = found.row, ""
    if found.excess_bytes:
        fits = f" (needs {found.excess_bytes / 2**30:.0f} GiB too much)"
    cells = [
        row.table, f"{row.label}, {row.gpus} {row.gpu}", str(row.gbs),
        name_of(found.expert), f"{_step_s(found.expert):.4g}{fits}", name_of(found.ours),
        f"{_step_s(found.ours):.4g}", f"{found.ratio:.3f}", f"{row.step_s:.4g}",
        f"{found.search_s:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


_HEAD = ("table", "row", "batch", "expert's plan", "predicted, s", "our plan", "predicted, s",
         "ours / expert's", "measured, s", "search, s")  # fmt: skip
_TEXT = """\
# Layouts that experts published

{day}, `python -m benchmarks.experts REPORT_DIR`, 2-core CPU machine. Predictions but for the
column `measured`. {count} rows. {verdict}

The measured step is that of the stack that the row ran on: its kernels and precision, not our
runtime's. Both predictions are of our runtime: bf16 computing with fp32 parameters, flash
attention, the row's cluster from presets. Stages are cut for equal flops, layouts inside a block
are the solver's for the expert's tp. Selective recompute is none here. Nothing is fitted.

"""


def verdict(found: Sequence[Compared]) -> str:
    """What the ratios show, of layouts that fit by our memory model."""
    fitting = sorted(one.ratio for one in found if not one.excess_bytes)
    if not fitting:
        return "No published layout fits by our memory model."
    slower = sum(ratio > 1 + ROUNDING for ratio in fitting)
    said = f"our plan is slower in {slower}" if slower else "our plan is never slower"
    return (
        f"Of {len(fitting)} layouts that fit by our memory model, in our cost model {said}: ours "
        f"over the expert's is {fitting[-1]:.3f} at most and {median(fitting):.3f} at the median. "
        f"{len(found) - len(fitting)} do not fit; there ours, which does, may take longer."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--searcher", default="auto")
    parser.add_argument("--per-table", type=int, default=4)
    options = parser.parse_args()
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    done = []
    for row in rows_of(options.report, options.per_table):
        try:
            found = compare(row, options.searcher)
        except (RowError, PlanError, Infeasible) as error:
            print(f"left out: {row.table} {row.label}: {error}", file=sys.stderr)
            continue
        done.append(found)
        lines.append(line(found))
        print(lines[-1], flush=True)
    if options.output and done:
        text = _TEXT.format(
            day=date.today().isoformat(), count=len(done), verdict=fill(verdict(done), 100)
        )
        options.output.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
