"""Table 4 of DAPPLE (PPoPP 2021): the strategies that our search finds from its layer profiles.

python -m benchmarks.dapple_table4 PROFILES_DIR [-o docs/results/dapple_table4.md]

PROFILES_DIR holds `profiling_results/*.txt` of github.com/AlibabaPAI/DAPPLE. Three searches per
cell: among the kinds of plans that the paper publishes; all pipelines with what the paper had; and
our whole space.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.dapple import TABLE_4
from benchmarks.dapple_setup import (
    ETHERNET,
    SCHEDULES,
    Published,
    config,
    cuts_of,
    fastest,
    problem,
    read,
    speedup,
    step_s,
)
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph import Graph
from meshwright.ir.layer_profile import LayerProfile
from meshwright.ir.plan import Plan
from meshwright.ir.profiled_graph import profiled_graph
from meshwright.planner.search import search_problem
from meshwright.planner.why import name_of

MAX_SAMPLES = {"BERT-48": 2, "XLNet-36": 2, "VGG-19": 190, "GNMT-16": 1024, "AmoebaNet-36": 4}
"""Samples that one device can train at a time: `max_bs` of the authors' script for XLNet, VGG and
GNMT; those of BERT and AmoebaNet, which it has not, are ours."""
STATE = 4
"""Parameter, gradient and two moments: as many times the parameters."""
PINS = ("zero=0", "recompute=none")
"""The paper has neither ZeRO nor, in this table, recompute; profiled layers have no tp."""
FAMILIES = ("pp=1", "pp=2", "pp=16")
"""Data parallel, two stages, straight: all plans of the table are of these kinds."""


def graph_of(profile: LayerProfile, batch: int, most: int) -> Graph:
    """The step, with layers that keep so much that `most` samples and no more fit one device.

    What they keep beyond what they read is in proportion to what they give.
    """
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    room = config("A").device_types[0].usable_bytes - STATE * parameters
    plain = profiled_graph(profile, batch)
    seen = sum(plain.tensors[name].nbytes / batch for op in plain.ops for name in op.saved)
    given = {
        layer.name: sum(layer.activation_bytes)
        for layer, reached in zip(profile.layers, profile.reached, strict=True)
        if reached  # others have no backward to keep anything for
    }
    share = max(0.0, room / (most + 0.5) - seen) / sum(given.values())
    kept = {name: round(share * nbytes) for name, nbytes in given.items()}
    return profiled_graph(profile, batch, kept_bytes=kept)


@dataclass(frozen=True)
class Cell:
    """A cell of the table: a model in a config."""

    model: str
    where: str
    profile: LayerProfile
    batch: int
    plan: Published
    searcher: str

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.profile, self.batch, MAX_SAMPLES[self.model])

    @cached_property
    def published(self) -> Plan:
        cuts = cuts_of(self.profile, self.plan, ETHERNET[self.where][1])
        given = problem(self.graph, config(self.where))
        return fastest(given, self.plan.replicas, cuts, SCHEDULES)

    @cached_property
    def kinds(self) -> Plan:
        """The best of the kinds that the paper publishes."""
        found = [self._pinned(family, name) for family in FAMILIES for name in SCHEDULES]
        return min((plan for plan in found if plan), key=step_s)

    @cached_property
    def pipelines(self) -> Plan:
        """The best of all pipelines without what the paper has not."""
        found = [self._pinned("", name) for name in SCHEDULES]
        return min((plan for plan in found if plan), key=step_s)

    @cached_property
    def free(self) -> Plan:
        """The best of our whole space."""
        return self._search(())

    @property
    def agrees(self) -> bool:
        return strategy(self.kinds) == strategy(self.published)

    @cached_property
    def same_replicas(self) -> Plan:
        """The best plan of the published strategy, cut anywhere (of two stages, else as it is)."""
        if len(self.plan.replicas) != 2:
            return self.published
        given = problem(self.graph, config(self.where))
        cuts = range(1, len(self.profile.layers))
        return min(
            (fastest(given, self.plan.replicas, (cut,), SCHEDULES[1:]) for cut in cuts), key=step_s
        )

    def _pinned(self, family: str, schedule: str) -> Plan | None:
        try:
            return self._search((*PINS, *filter(None, (family,)), f"schedule={schedule}"))
        except Infeasible:
            return None

    def _search(self, constraints: Sequence[str]) -> Plan:
        given = problem(self.graph, config(self.where), constraints)
        return search_problem(given, self.searcher, time_limit_s=600)


def strategy(plan: Plan) -> str:
    """`DP`, `straight` or the replicas of each stage."""
    if len(plan.stages) == 1:
        return "DP"
    replicas = [stage.dp for stage in plan.stages]
    return "straight" if set(replicas) == {1} else ":".join(map(str, replicas))


def cells(folder: Path, searcher: str) -> Iterator[Cell]:
    """The 15 cells that have a profile."""
    for model, (file, batch, configs) in TABLE_4.items():
        profile = read(folder, file)
        for where, (published, *_) in configs.items():
            yield Cell(model, where, profile, batch, published, searcher)


def row(cell: Cell) -> str:
    """A line of the table."""
    theirs, best = step_s(cell.published), step_s(cell.kinds)
    gap = "" if cell.agrees else f"{step_s(cell.same_replicas) / best - 1:+.1%}"
    shown = [
        cell.model, cell.where, strategy(cell.published), strategy(cell.kinds),
        "yes" if cell.agrees else "no", gap, f"{theirs * 1e3:.4g}", f"{best * 1e3:.4g}",
        f"{theirs / best:.2f}", name_of(cell.kinds), f"{speedup(cell.profile, cell.kinds):.1f}",
        name_of(cell.pipelines), f"{theirs / step_s(cell.pipelines):.2f}",
        name_of(cell.free), f"{theirs / step_s(cell.free):.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(shown)} |"


_HEAD = ("model", "config", "published", "ours", "agrees", "published replicas", "published, ms",
         "ours, ms", "ratio", "plan", "speedup", "all pipelines", "ratio", "whole space",
         "ratio")  # fmt: skip
_TEXT = """\
# Table 4 of DAPPLE (PPoPP 2021)

{date}, `python -m benchmarks.dapple_table4 PROFILES_DIR`, 2-core CPU machine. Predictions: no GPU
was measured. {agree} of {all} cells agree in strategy and replication; our plan of the published
kinds is never slower than the published plan: the ratio is {least:.2f} or more.

"""
_NOTES = """
`ratio`: step time of the published plan over that of ours, in the same simulator. The published
plan has the published replicas and split, and the best number of micro-batches and of PA and PB,
which are not published. `published replicas`: where we disagree, how much slower the best plan
with the published replicas is, cut anywhere. `speedup`: over one V100 at the profile's times.

Chosen before looking at the outcome here, all from the paper or its authors' files:
- link constants and 16 V100-16GB as in [dapple.md](dapple.md); at least one sample per replica of
  each micro-batch, which a replicated stage splits; schedules PA and PB; no ZeRO, no recompute
- the kinds of plans that the table has: data parallel, two stages, one layer group per device
- memory: a device holds `max_bs` samples of the whole model ({most})
- what crosses a cut are all live tensors, each once. XLNet's profile has an edge from the token
  embedding to the position encodings, which depend on no parameter: it is dropped. Then the ratios
  of communication to computation equal the published ones for XLNet and BERT

`all pipelines`: any number of stages and replicas under the same pins. `whole space`: ZeRO, other
schedules, recompute too, nothing pinned.

Where we disagree, the simulator has what the paper's latency has not. Gradients are reduced in
buckets during the last backward, so large replicated stages are cheaper. A message is asked for one
action ahead, not by a network stage of its own, so pipelines with one device at an end wait longer.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--searcher", default="auto")
    options = parser.parse_args()
    done = []
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    for cell in cells(options.profiles, options.searcher):
        lines.append(row(cell))
        print(lines[-1], flush=True)
        done.append(cell)
    least = min(step_s(cell.published) / step_s(cell.kinds) for cell in done)
    agree = sum(cell.agrees for cell in done)
    print(f"{agree} of {len(done)} agree; least ratio {least:.3f}")
    if options.output:
        most = ", ".join(f"{name} {count}" for name, count in MAX_SAMPLES.items())
        text = _TEXT.format(date="2026-11-21", agree=agree, all=len(done), least=least)
        options.output.write_text(text + "\n".join(lines) + "\n" + _NOTES.format(most=most))


if __name__ == "__main__":
    main()
