"""Models with large tables on four Gloo processes and a slow wire: plans found by a search that
knows how often rows occur, beside plain data parallelism, DDP, DDP with sparse tables and torchrec.

python -m benchmarks.embrace [--mbits 500] [--turns 15] [--repeats 3] [-o docs/results/embrace.md]

Each rank has a network of its own with a cable that the kernel holds to that speed in either
direction (`benchmarks.embrace.wire`): root, or `unshare -rn` before the command. All train the same
model on the same batches with Adagrad, a step each in turns, then a step each on a free wire; the
slowest rank of a step counts. `ours` is what a search finds by itself, `ours, replicas` what it
finds with data parallelism alone, where what it chooses are forms of tables.

At last, the gain that the simulator says of the clusters of EmbRace's paper.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.embrace.agreement import disagreement
from benchmarks.embrace.contenders import OPTIMIZER, OURS, PLAIN, REPLICAS
from benchmarks.embrace.models import Case, language, recommender, tokens
from benchmarks.embrace.paper import paper_table
from benchmarks.embrace.turns import Seen, run_turns
from benchmarks.embrace.wire import HEADERS_LEAVE, be_a_switch
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search
from meshwright.profiling.measure_local import measure_local
from meshwright.profiling.rows import count_rows

RANKS, COUNTED = 4, 10
"""Batches on which rows are counted, of others than are trained on."""
UNSEEN = 10_000


@dataclass(frozen=True)
class Row:
    """What is said of one of them."""

    name: str
    step_s: float
    band: tuple[float, float]
    """Quartiles of its steps."""
    over_plain: float
    """How many times as fast as ours with whole tables in the same turn; the median."""
    plain_band: tuple[float, float]
    exposed_s: float
    """What a step takes longer on the slow wire than on the free one in the same turn; median."""
    apart: float
    """Largest relative difference of its losses from those of ours with whole tables."""


def wired(machine: Cluster, bits_per_s: float) -> Cluster:
    """The measured machine with such a wire between its processes."""
    node = machine.nodes[0]
    link = replace(
        node.link, name="slow wire", bandwidth_bytes_per_s=bits_per_s / 8,
        efficiency=HEADERS_LEAVE, curves=(), beside=(),
    )  # fmt: skip
    return replace(machine, nodes=(replace(node, link=link),))


def plans(case: Case, cluster: Cluster, limit_s: float = 30) -> dict[str, Plan]:
    """Ours: with all that a search knows, with replicas alone, and these without what is known of
    rows."""
    graph = trace(case.model(), case.batch(0))
    rows = count_rows(case.model(), [case.batch(UNSEEN + step) for step in range(COUNTED)])
    alone = ("pp=1", "model=1")
    whole = (*alone, f"dp_replicate={cluster.num_devices}", "zero=0")
    asked: dict[str, dict[str, object]] = {
        OURS: {"rows": rows}, REPLICAS: {"rows": rows, "constraints": alone},
        PLAIN: {"constraints": whole},
    }  # fmt: skip
    precision = "fp64" if case.dtype == torch.float64 else "fp32"
    return {
        name: search(
            graph, cluster, precision=precision, optimizer=OPTIMIZER, progress=False,
            time_limit_s=limit_s, **more,
        )
        for name, more in asked.items()
    }  # fmt: skip


def rows_of(seen: Mapping[str, Seen]) -> list[Row]:
    plain = seen[PLAIN]
    found = []
    for name, own in seen.items():
        ratios = [a / b for a, b in zip(plain.slow_s, own.slow_s, strict=True)]
        apart = max(abs(a - b) / abs(b) for a, b in zip(own.losses, plain.losses, strict=True))
        found.append(Row(
            name, median(own.slow_s), band(own.slow_s), median(ratios), band(ratios),
            median(a - b for a, b in zip(own.slow_s, own.free_s, strict=True)), apart,
        ))  # fmt: skip
    return found


def band(values: list[float]) -> tuple[float, float]:
    """The quartiles."""
    low, _, high = quantiles(values, n=4)
    return low, high


def exposed_s(case: Case, machine: Cluster, planned: Mapping[str, Plan]) -> dict[str, float]:
    """Predicted: what steps take longer than on the machine's own links, by name of the plan."""
    graph = trace(case.model(), case.batch(0))
    free = make_problem(graph, machine, precision="fp32", optimizer=OPTIMIZER)
    found = {}
    for name, plan in planned.items():
        assert plan.predicted
        found[name] = plan.predicted.step_s - predict_plan(free, plan).step_s
    return found


def measured(times: int = 3) -> Cluster:
    """This machine at its fastest: others that use it only slow it."""
    tries = [measure_local(RANKS) for _ in range(times)]
    return max(tries, key=lambda found: found.device_types[0].peak_flops["float32"])


def lines(
    found: list[Row], planned: Mapping[str, Plan], wire_s: Mapping[str, float]
) -> Iterator[str]:
    """A table in Markdown."""
    yield (
        "| | step, ms | quartiles | predicted | times as fast as whole tables | quartiles | "
        "predicted | by the wire, ms | predicted | losses apart |"
    )
    yield "|---" * 10 + "|"
    for row in found:
        said = planned.get(row.name)
        step, ratio, exposed = "", "", ""
        if said and said.predicted:
            plain = planned[PLAIN].predicted
            assert plain
            step, ratio = f"{1e3 * said.predicted.step_s:.0f}", ""
            ratio = f"{plain.step_s / said.predicted.step_s:.1f}"
            exposed = f"{1e3 * wire_s[row.name]:.0f}"
        yield (
            f"| {row.name} | {1e3 * row.step_s:.0f} | {_range(row.band, 1e3, 0)} | {step} | "
            f"{row.over_plain:.1f} | {_range(row.plain_band, 1, 1)} | {ratio} | "
            f"{1e3 * row.exposed_s:.0f} | {exposed} | {row.apart:.0e} |"
        )


def _range(pair: tuple[float, float], times: float, digits: int) -> str:
    return "-".join(f"{times * value:.{digits}f}" for value in pair)


def forms(plan: Plan) -> str:
    """The stages of a plan, and the forms of their tables, in short."""
    told = []
    for stage in plan.stages:
        axes = " ".join(f"{axis} {size}" for axis, size in stage.mesh.items() if size > 1)
        of = {path: c.sync.form for path, c in stage.by_parameter.items() if c.sync}
        kinds = [
            f"{form} for {list(of.values()).count(form)} tables"
            for form in dict.fromkeys(of.values())
        ]
        told.append(", ".join([axes, *kinds]))
    return "; then ".join(told)


def report(mbits: float, turns: int, repeats: int) -> Iterator[str]:
    """All of it, piece by piece as it is found."""
    tokens()
    machine = measured()
    cluster = wired(machine, 1e6 * mbits)
    be_a_switch()
    for case in (language(), recommender()):
        planned = plans(case, cluster)
        yield f"\n## {case.name}\n"
        for name, plan in planned.items():
            yield f"- {name}: {forms(plan)}"
        exact = replace(case, dtype=torch.float64)
        apart = disagreement(exact, plans(exact, cluster), RANKS)
        yield (
            "\nIn float64 losses of 5 steps are apart from those of whole tables by "
            + ", ".join(f"{value:.0e} ({name})" for name, value in apart.items())
            + ".\n"
        )
        wire_s = exposed_s(case, machine, planned)
        for turn in range(repeats):
            seen = run_turns(case, planned, RANKS, 1e6 * mbits, turns)
            yield f"\nRun {turn + 1} of {repeats}:\n"
            yield from lines(rows_of(seen), planned, wire_s)
    yield "\n## The clusters of the paper, simulated\n"
    yield from paper_table()


def main() -> None:
    """Prints the report; with `-o` it is written too."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mbits", type=float, default=500)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    found = [f"{date.today()}, `{' '.join(['python -m benchmarks.embrace', *sys.argv[1:]])}`"]
    print(found[0])
    for line in report(given.mbits, given.turns, given.repeats):
        print(line, flush=True)
        found.append(line)
    if given.output:
        given.output.write_text("\n".join(found) + "\n")
