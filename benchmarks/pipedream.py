"""Our plans against those of PipeDream's planner, on measured layer profiles.

python -m benchmarks.pipedream PROFILES_DIR [-o docs/results/pipedream.md]

PROFILES_DIR holds, anywhere below it, profiles of PipeDream (profiler/*/profiles of
github.com/msr-fiddle/pipedream) and DAPPLE (profiling_results of github.com/AlibabaPAI/DAPPLE) as
`<name>.txt`. Clusters are those of DAPPLE's evaluation, with its authors' link constants.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.dapple.setup import CONFIGS, config, corrected, problem, speedup, step_s
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile, read_layer_profile
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem

PUBLISHED = 3.23
"""DAPPLE's abstract: at most so many times as fast as PipeDream's planner, on VGG-19."""
IMAGE = 3 * 224 * 224 * 4
"""Bytes of one input of PipeDream's image models: their profiles give the whole micro-batch's."""
SENTENCES = 64
"""Micro-batch of PipeDream's GNMT profiles, which do not say: that of its paper. Their embeddings
hold a whole number of positions times it."""
BATCHES = {"bert-48-pbs-2": 64, "bert-24-pbs-6": 128, "xlnet-36-pbs-1": 128, "xlnet-24-pbs-1": 128,
           "amoeba-36-pbs-1": 128, "vgg-19-pbs-32": 2048, "gnmt-16-pbs-64": 1024}  # fmt: skip
"""Global batches of DAPPLE's tables; XLNet-24 is in none and has that of XLNet-36."""
DEVICES = 16


def read(path: Path) -> LayerProfile:
    """A profile, with the micro-batch that its name, its input or PipeDream's paper says."""
    if path.stem in BATCHES:
        return corrected(read_layer_profile(path))
    probe = read_layer_profile(path, SENTENCES)
    first = probe.layers[0]
    if first.description != "Input":
        return probe
    images, rest = divmod(first.activation_bytes[0], IMAGE)
    if rest or not images:
        raise PlanError(
            f"{path.name}: its input is {first.activation_bytes[0]} bytes, no whole number of "
            f"224x224 images of {IMAGE} bytes"
        )
    return read_layer_profile(path, images)


def batch_of(profile: LayerProfile) -> int:
    """DAPPLE's, or a profiled micro-batch for each device, as PipeDream runs."""
    return BATCHES.get(profile.name, DEVICES * profile.micro_batch)


@dataclass(frozen=True, slots=True)
class Row:
    """One profile on one cluster."""

    profile: LayerProfile
    config: str
    theirs: Plan | None
    """None if no plan of theirs fits."""
    ours: Plan

    @property
    def ratio(self) -> float | None:
        return step_s(self.theirs) / step_s(self.ours) if self.theirs else None


def rows(folder: Path, searcher: str) -> Iterator[Row]:
    """Every profile on every cluster."""
    paths = sorted(folder.glob("**/*.txt"))
    if not paths:
        raise PlanError(f"{folder} holds no layer profiles (*.txt), in itself or below")
    for path in paths:
        profile = read(path)
        graph = profiled_graph(profile, batch_of(profile))
        for name in CONFIGS:
            given = problem(graph, config(name))
            try:
                theirs = search_problem(given, "pipedream", time_limit_s=600)
            except Infeasible:
                theirs = None
            yield Row(profile, name, theirs, search_problem(given, searcher, time_limit_s=600))


def line(row: Row) -> str:
    theirs, ratio = row.theirs, row.ratio
    cells = [
        row.profile.name, row.config, str(row.ours.global_batch_size),
        name_of(theirs) if theirs else "none fits",
        f"{step_s(theirs) * 1e3:.4g}" if theirs else "",
        name_of(row.ours), f"{step_s(row.ours) * 1e3:.4g}",
        f"{speedup(row.profile, row.ours):.1f}", f"{ratio:.2f}" if ratio else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


_HEAD = ("profile", "config", "batch", "PipeDream's plan", "ms", "our plan", "ms", "speedup",
         "ratio")  # fmt: skip
_TEXT = """\
# PipeDream's planner

{day}, `python -m benchmarks.pipedream PROFILES_DIR`, 2-core CPU machine. Predictions: no GPU
was measured. {count} profiles and clusters; step time of PipeDream's plan over that of ours, in the
same simulator: {least:.2f} at least, {middle:.2f} at the median, {most:.2f} at most. Published:
DAPPLE's plans are up to {published} times as fast as those of PipeDream's planner.

"""
_NOTES = """
PipeDream's planner is `planner/searchers/pipedream.py`, from its paper (SOSP 2019). Its plan runs
synchronously under 1F1B, planned anew for every number of micro-batches, of which the best counts:
kinder than what DAPPLE compared with, which planned at the profiled micro-batch. Ours is the
default search over its whole space. `speedup` of ours: over one V100 at the profile's times.

Clusters and link constants as in [dapple.md](dapple.md): 16 V100-16GB, A 2x8, B and C 16x1 with 25
and 10 Gb/s. Batches: those of DAPPLE's tables; a profiled micro-batch per device for PipeDream's
profiles. Layers keep what they read and take time in proportion to their samples.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--searcher", default="auto")
    options = parser.parse_args()
    lines, ratios = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"], []
    for row in rows(options.profiles, options.searcher):
        lines.append(line(row))
        print(lines[-1], flush=True)
        if row.ratio:
            ratios.append(row.ratio)
    text = _TEXT.format(
        day=date.today().isoformat(), count=len(lines) - 2, least=min(ratios),
        middle=median(ratios), most=max(ratios), published=PUBLISHED,
    )  # fmt: skip
    print(text)
    if options.output:
        options.output.write_text(text + "\n".join(lines) + "\n" + _NOTES)


if __name__ == "__main__":
    main()
