"""What forms for embedding tables send, and whether searches choose the one that sends least.

python -m benchmarks.row_forms [--cases 100] [--width 512] [--tokens 2048]

First, on the words of this interpreter's own library as a stream of tokens (identifiers of
Lib/*.py and Lib/*/*.py, in order of files): bytes that a rank sends in a step of so many tokens on
each rank, by the table's gradient whole (all-reduced in a ring), rows and numbers gathered from
all, packed rows with a bit for each row (`packed_rows`), distinct rows to their owners and back,
and their numbers (`owned_rows`; `late_rows` sends a byte more for each, `owned_columns` and
`late_columns` the numbers to all), and the same of every token. Rows are counted, step by step.
Beside packed rows stands what S2 Reducer's abstract says of its sketches.

Then, random tables, batches and frequencies on a wire so slow that nothing else counts: how often
the plan with the shortest predicted step has the form that sends least by these formulas (within 2
percent; of late forms 200 bytes go while a step computes, which may be more than they send beside).
"""

import argparse
import re
import sysconfig
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.tables import variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

STEPS = 20
_BANDWIDTH, _COMPUTING_S = 1e5, 2e-3
"""Of the slow wire, the slowest that a cluster may have; and of a step of the small model on it."""
_LATE = ("late_rows", "late_columns")
S2_BYTES, S2_TIMES = 0.19, 1.8
"""Of the bytes of sparse gradients, and times as fast: five models (Ge et al. 2021)."""
_WORD = re.compile(r"[A-Za-z_]\w*")


def sent_bytes(ranks: int, rows: int, row: int, union: float, each: float) -> dict[str, float]:
    """By one rank in a step, by form; `row`: bytes of a row; `union`: distinct rows of all ranks,
    `each`: of one."""
    others = (ranks - 1) / ranks
    columns = others * each * 2 * row + (ranks - 1) * each * 8
    return {
        "": 2 * others * rows * row,
        "gathered_rows": (ranks - 1) * each * (row + 8),
        "packed_rows": 2 * others * (union * row + rows / 8),
        "owned_rows": others * each * (2 * row + 8),
        "owned_columns": columns,
        "late_columns": columns,
        "late_rows": others * each * (2 * row + 8 + 1),
    }


class _One(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(rows, width), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(ids)).mean()
        return found


def case(seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Predicted seconds of a step and bytes sent by each form, of a random table."""
    draw = np.random.default_rng(seed)
    rows, width = int(draw.integers(1_000, 60_000)), int(draw.integers(1, 64))
    ranks, samples = int(draw.choice([2, 4, 8])), 8 * int(draw.integers(1, 400))
    counts = RowCounts(zipf=float(draw.uniform(0.3, 1.6)))
    cluster = Cluster.preset("v100-16", num_nodes=ranks, devices_per_node=1)
    assert cluster.between_nodes
    wire = replace(
        cluster.between_nodes,
        bandwidth_bytes_per_s=_BANDWIDTH,
        latency_s=0.0,
        launch_s=0.0,
        curves=(),
    )
    problem = make_problem(
        trace(_One(rows, width), (torch.zeros(samples, dtype=torch.int64),)),
        replace(cluster, between_nodes=wire), precision="fp32", optimizer="sgd", rows=counts,
    )  # fmt: skip
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=ranks))
    steps = {"": plan.predicted.step_s} if plan.predicted else {}
    for variant in variants(problem, plan):
        choice = variant.stages[0].by_parameter["words.weight"]
        assert variant.predicted and choice.sync
        steps[choice.sync.form] = variant.predicted.step_s
    union = counts.distinct("words", rows, samples)
    each = counts.distinct("words", rows, samples // ranks)
    assert union and each
    return steps, sent_bytes(ranks, rows, 4 * width, union, each)


def is_least(steps: dict[str, float], sent: dict[str, float]) -> bool:
    """Whether the form of the shortest step sends least, within 2 percent; of a late form, what
    goes while a step computes counts for nothing."""
    best, most = min(steps, key=steps.__getitem__), 1.02 * min(sent.values())
    hidden = _COMPUTING_S * _BANDWIDTH if best in _LATE else 0.0
    return steps.keys() == sent.keys() and sent[best] <= most + hidden


def library_tokens() -> np.ndarray:
    """Numbers of the words of the interpreter's library, in order of files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    numbers: dict[str, int] = {}
    found: list[int] = []
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        if "site-packages" not in path.parts:
            words = _WORD.findall(path.read_text(encoding="utf-8", errors="replace"))
            found += [numbers.setdefault(word, len(numbers)) for word in words]
    return np.array(found)


def library_row(ids: np.ndarray, ranks: int, tokens: int, width: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, averaged over steps spread over the stream."""
    rows, row = int(ids.max()) + 1, 4 * width
    starts = np.linspace(0, len(ids) - ranks * tokens, STEPS).astype(int)
    parts = [ids[start : start + ranks * tokens].reshape(ranks, tokens) for start in starts]
    each = mean(mean(len(np.unique(own)) for own in part) for part in parts)
    union = mean(len(np.unique(part)) for part in parts)
    sent = sent_bytes(ranks, rows, row, union, each)
    others = (ranks - 1) / ranks
    return {
        "whole": sent.pop(""), **sent,
        "every token": 2 * others * tokens * (row + 8), "distinct": each, "of all": union,
    }  # fmt: skip


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    ids, out = library_tokens(), Console(width=180)
    out.print(f"{len(ids):,} tokens, {int(ids.max()) + 1:,} words, width {given.width}")
    table: Table | None = None
    for ranks in (4, 8, 16):
        row = library_row(ids, ranks, given.tokens, given.width)
        table = table or Table("ranks", *(f"{n}, MB" if n[0] != "d" and n[0:2] != "of" else n
                                          for n in row))  # fmt: skip
        cells = [f"{x:,.0f}" if name in ("distinct", "of all") else f"{x / 1e6:.2f}"
                 for name, x in row.items()]  # fmt: skip
        table.add_row(str(ranks), *cells)
        out.print(
            f"{ranks} ranks: packed rows, which are exact, take "
            f"{row['packed_rows'] / row['whole']:.3f} of the whole; S2 Reducer published "
            f"{S2_BYTES} by sketches, and steps {S2_TIMES} times as fast"
        )
    out.print(table)
    least = sum(is_least(*case(seed)) for seed in range(given.cases))
    out.print(f"the plan's form sends least in {least} of {given.cases} random cases")


if __name__ == "__main__":
    main()
