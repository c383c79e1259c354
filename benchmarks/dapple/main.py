"""DAPPLE's published figures against ours, from its public V100 layer profiles and link constants.

python -m benchmarks.dapple PROFILES_DIR [-o docs/results/dapple.md]

PROFILES_DIR holds `profiling_results/*.txt` of github.com/AlibabaPAI/DAPPLE. All plans go through
the same graph, plan and `estimate` as those of traced models.
"""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from benchmarks.dapple import table5
from benchmarks.dapple.setup import (
    CONFIGS,
    ETHERNET,
    SCHEDULES,
    Published,
    cluster,
    config,
    cuts_of,
    fastest,
    graph_of,
    problem,
    read,
    speedup,
)
from benchmarks.printed import print_page
from meshwright.costmodel.comm.comm import collective_time, group_levels
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile
from meshwright.planner.problem.candidates import build_plan, uniform_choice

FOUR = Published((8,) * 4)
# Model -> profile, batch, plan on 2x8 (table 6), its speedup (read off figure 12), and the same on
# 4x8, where the plan is not published: as the authors' script has them, a stage per node, or for
# AmoebaNet (and VGG, which it does not have) twice the replicas.
FIGURE_12 = {
    "XLNet-36": ("xlnet-36-pbs-1", 128, Published((8, 8), ("Layer_18",)), 14.9, FOUR, 23.8),
    "BERT-Large": ("bert-24-pbs-6", 128, Published((8, 8), ("layer_12",)), 14.5, FOUR, 24.4),
    "AmoebaNet-36": ("amoeba-36-pbs-1", 128, Published((8, 8), ("cell_25",)), 11.6,
                     Published((16, 16), ("cell_25",)), 12.7),
    "VGG-19": ("vgg-19-pbs-32", 1024, Published((14, 2), ("Conv2d_5_1",)), 9.6,
               Published((28, 4), ("Conv2d_5_1",)), 16.3),
}  # fmt: skip
# (Model, config) -> plan (table 4); speedups by eye from figure 11: best hybrid, data parallel with
# overlap and without. Where the plan is data parallel the best hybrid is not the plan: nothing.
STRAIGHT = Published((1,) * 16)
DP = Published((16,))
Cell = tuple[Published, float | None, float | None, float | None]
TABLE_4: dict[str, tuple[str, int, dict[str, Cell]]] = {
    "BERT-48": ("bert-48-pbs-2", 64, {
        "A": (Published((8, 8), ("layer_23",)), 14.0, 10.5, 9.1),
        "B": (STRAIGHT, 12.5, 10.5, 9.1), "C": (STRAIGHT, 12.5, 5.2, 5.0)}),
    "XLNet-36": ("xlnet-36-pbs-1", 128, {
        "A": (Published((8, 8), ("Layer_18",)), 14.9, 11.0, 10.6),
        "B": (Published((8, 8), ("Layer_18",)), 10.9, 9.3, 9.0), "C": (STRAIGHT, 10.8, 6.3, 6.1)}),
    "GNMT-16": ("gnmt-16-pbs-64", 1024, {
        "A": (Published((8, 8), ("LSTM(2048, 1024)#2",)), 10.2, 5.0, 4.4),
        "B": (Published((8, 8), ("LSTM(2048, 1024)#2",)), 5.3, 5.0, 4.4),
        "C": (STRAIGHT, 4.4, 1.9, 1.8)}),
    "VGG-19": ("vgg-19-pbs-32", 2048, {
        "A": (DP, None, 14.8, 10.1), "B": (DP, None, 14.8, 10.1),
        "C": (Published((15, 1), ("Conv2d_5_2",)), 9.2, 7.0, 5.8)}),
    "AmoebaNet-36": ("amoeba-36-pbs-1", 128, {
        "A": (Published((8, 8), ("cell_24",)), 12.0, 6.5, 5.9),
        "B": (Published((11, 5), ("cell_27",)), None, None, None),
        "C": (Published((11, 5), ("cell_27",)), None, None, None)}),
}  # fmt: skip


def figure_12(folder: Path) -> tuple[list[str], int]:
    """Table rows, and how many models are within 10 % on 2x8."""
    rows, close = [], 0
    for name, (file, batch, published, on_16, wide, on_32) in FIGURE_12.items():
        profile = read(folder, file)
        graph = graph_of(profile, batch)
        plan = fastest(problem(graph, config("A")), published.replicas,
                       cuts_of(profile, published), SCHEDULES)  # fmt: skip
        found = speedup(profile, plan)
        close += abs(found / on_16 - 1) <= 0.10
        large = fastest(problem(graph, cluster("A", 4, 8)), wide.replicas,
                        cuts_of(profile, wide), SCHEDULES)  # fmt: skip
        rows.append(
            f"| {name} | {batch} | {_plan(plan)} | {on_16} | {found:.1f} | {found / on_16 - 1:+.1%}"
            f" | {_plan(large)} | {on_32} | {speedup(profile, large):.1f} |"
        )
    return rows, close


def table_4(folder: Path) -> Iterator[str]:
    for name, (file, batch, configs) in TABLE_4.items():
        profile = read(folder, file)
        graph = graph_of(profile, batch)
        for where, (published, hybrid, overlapped, alone) in configs.items():
            given = problem(graph, config(where))
            cuts = cuts_of(profile, published, ETHERNET[where][1])
            plan = fastest(given, published.replicas, cuts, SCHEDULES)
            data = build_plan(given, uniform_choice(given, dp_replicate=16))
            yield (
                f"| {name} | {where} | {_plan(plan)} | {_or(hybrid)} | "
                f"{speedup(profile, plan):.1f} | {_or(overlapped)} | {speedup(profile, data):.1f} "
                f"| {_or(alone)} | {_without_overlap(profile, data, where):.1f} |"
            )


def _without_overlap(profile: LayerProfile, plan: Plan, where: str) -> float:
    """Speedup of data parallelism when the all-reduce follows the backward in one piece."""
    assert plan.predicted
    stage = plan.predicted.stages[0]
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    reduce_s = collective_time(
        Primitive.ALL_REDUCE, weights, group_levels(range(16), config(where))
    )
    compute_s = plan.global_batch_size / 16 * profile.sample_s
    return plan.global_batch_size * profile.sample_s / (compute_s + reduce_s + stage.optimizer_s)


def _or(value: float | None) -> str:
    return "" if value is None else f"{value}"


def _plan(plan: Plan) -> str:
    shape = ":".join(str(stage.dp) for stage in plan.stages)
    shape = "straight" if len(plan.stages) > 4 else shape
    return f"{shape} x{plan.num_microbatches} {plan.schedule.name.removeprefix('dapple_')}"


def table_5(folder: Path) -> tuple[list[str], float]:
    """Table rows, and the worst error of the rows that are neither fitted nor GPipe recomputed."""
    profile = read(folder, "bert-48-pbs-2")
    forward = sum(x.forward_s for x in profile.layers) / profile.sample_s / profile.micro_batch
    plain, again = table5.fit(False, forward), table5.fit(True, forward)
    room_gb = config("B").device_types[0].usable_bytes / 1e9
    rows, worst = [], 0.0
    for row in table5.ROWS:
        found = table5.predicted(row, again if row.recompute else plain, forward)
        mean, most = table5.memory_gb(profile, row)
        error = "fitted" if row.fitted else ""
        if row.samples_per_s and not row.fitted:
            off = found / row.samples_per_s - 1
            error = f"{off:+.1%}"
            if not (row.recompute and row.schedule == "gpipe"):
                worst = max(worst, abs(off))
        speed = "out of memory" if row.samples_per_s is None else f"{row.samples_per_s:.2f}"
        rows.append(
            f"| {row.label} | {speed} | {found:.2f} | {error} | "
            f"{table5.unfitted(table5.plan_of(profile, row)):.2f} | {_or(row.average_gb)} | "
            f"{mean:.1f} | {most:.1f}{' out of memory' if most > room_gb else ''} |"
        )
    fits = [f"tau {f.tau_s:.4f} s, once per step {f.once_s:.4f} s" for f in (plain, again)]
    rows.append("")
    rows.append(f"Fits: {fits[0]}; with recompute {fits[1]}. Usable memory {room_gb:.2f} GB.")
    return rows, worst


_INTRO = """\
# DAPPLE (PPoPP 2021) from its own profiles

{today}, `python -m benchmarks.dapple PROFILES_DIR`. Predictions: no machine was measured.

Speedup: over one V100 that runs the whole global batch one sample after the other at the profile's
times (no optimizer step). Replicas and split as published; the number of micro-batches and PA or
PB are not published: the best of all that give each replica a sample. Links: the authors'
constants. Configs: {configs}. Nothing is fitted but Table 5.

## Figure 12: {close} of 4 models within 10 % on 2x8

On 4x8 neither plans nor batches are published: for information, with the batch of 2x8 and a stage
per node (AmoebaNet and VGG: twice the replicas). Profiles are taken as linear in the samples, which
flatters small micro-batches: VGG-19 was profiled with 32 samples and runs with 5 here.
"""
_TABLE_5 = """\

## Table 5: worst unfitted row {worst:.1%} off, GPipe with recompute apart

BERT-48, 2 stages, config B, micro-batches of 2. Two numbers are fitted to the rows marked so, for
each of plain and recompute. `profile` is with nothing fitted: the profile is faster than the runs.
Memory is not fitted: state of 16 bytes per parameter, what a layer keeps as traced from BERT in
float32; the mean of both stages, and the most of one.

What is off: GPipe with recompute is slower than DAPPLE at equal M in the paper, where both
schedules have the same bubbles, and grows by 1.1 GB per micro-batch, ten times what crosses the
stages' boundary; so its M=8 is not out of memory here.
"""
_TABLE_4 = """\

## Table 4's plans and figure 11, for information

Figure 11 is read by eye (+-0.4). `dp` is data parallel with the overlap of our simulator,
`dp alone` without any. BERT-48's data parallel curves need three times slower compute than its
profile, so they are not from the same runs. Straight plans are cut for the slowest stage or link.
XLNet's 4 MB of position encodings, which all layers read, depend on no parameter: every stage makes
them itself, though its profile has an edge to them from the token embedding.
"""


def _header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def report(folder: Path) -> str:
    """The whole page."""
    rows_12, close = figure_12(folder)
    rows_5, worst = table_5(folder)
    configs = ", ".join(f"{name} {n}x{d}" for name, (n, d) in CONFIGS.items())
    return "\n".join([
        _INTRO.format(today=date.today(), configs=configs, close=close),
        *_header("model", "batch", "plan", "published", "predicted", "error", "plan on 4x8",
                 "published", "predicted"),
        *rows_12,
        _TABLE_5.format(worst=worst),
        *_header("row", "samples/s", "predicted", "error", "profile", "GB", "predicted", "most"),
        *rows_5,
        _TABLE_4,
        *_header("model", "config", "plan", "hybrid", "predicted", "dp", "predicted", "dp alone",
                 "predicted"),
        *table_4(folder),
        "",
    ])  # fmt: skip


def main() -> None:
    print_page(__doc__, report, "profiles")
