"""Table 4 of DAPPLE (PPoPP 2021): the strategies that our search finds from its layer profiles.

python -m benchmarks.dapple.table4 PROFILES_DIR [-o docs/results/dapple_table4.md]

PROFILES_DIR holds `profiling_results/*.txt` of github.com/AlibabaPAI/DAPPLE. The search is among
the kinds of plans that the paper publishes, counted as DAPPLE's planner counts; with --whole also
in our whole space, as our runtime runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.dapple.main import TABLE_4
from benchmarks.dapple.setup import (
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
from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem

MAX_SAMPLES = {"BERT-48": 2, "XLNet-36": 2, "VGG-19": 190, "GNMT-16": 1024, "AmoebaNet-36": 4}
"""Samples that one device can train at a time: `max_bs` of the authors' script for XLNet, VGG and
GNMT; those of BERT and AmoebaNet, which it has not, are ours."""
PARTS = 64
"""Of a sample: DAPPLE's planner divides the time of a micro-batch by the replicas, whether that
gives whole samples or not (sync_pipeline.rs of the authors' repository). So samples are cut."""
ALL_AT_ONCE = 2**62
"""Bytes: gradients of a pipeline's stage are reduced together, after its last backward. That is so
in the paper's latency (3.2), in sync_pipeline.rs and in analysis_dapple.py; only data parallelism
overlaps them there."""
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
    """With parts of samples as its samples."""
    batch: int
    """In such parts."""
    plan: Published
    searcher: str

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.profile, self.batch, PARTS * MAX_SAMPLES[self.model])

    @property
    def counts(self) -> str:
        """As many micro-batches as there are profiled ones, at most."""
        return f"num_microbatches<={self.batch // self.profile.micro_batch}"

    def given(self, constraints: Sequence[str] = (), *, overlap: bool) -> Problem:
        asked = problem(self.graph, config(self.where), (*constraints, self.counts))
        if overlap:
            return asked
        late = CostTables(asked.graph, asked.cluster, asked.precision, bucket_bytes=ALL_AT_ONCE)
        return replace(asked, tables=late)

    @cached_property
    def published(self) -> Plan:
        return self._published(overlap=len(self.plan.replicas) == 1)

    @cached_property
    def published_here(self) -> Plan:
        """In our runtime."""
        return self._published(overlap=True)

    def _published(self, *, overlap: bool) -> Plan:
        cuts = cuts_of(self.profile, self.plan, ETHERNET[self.where][1])
        return fastest(self.given(overlap=overlap), self.plan.replicas, cuts, SCHEDULES)

    @cached_property
    def kinds(self) -> Plan:
        """The best of the kinds that the paper publishes."""
        asked = [(f, s) for f in FAMILIES for s in SCHEDULES[: 1 if f == "pp=1" else 2]]
        found = [self._pinned(family, name) for family, name in asked]
        return min((plan for plan in found if plan), key=step_s)

    @cached_property
    def free(self) -> Plan:
        """The best of our whole space."""
        return search_problem(self.given(overlap=True), self.searcher, time_limit_s=600)

    @property
    def agrees(self) -> bool:
        return strategy(self.kinds) == strategy(self.published)

    @cached_property
    def same_replicas(self) -> Plan:
        """The best plan of the published strategy, cut anywhere (of two stages, else as it is)."""
        if len(self.plan.replicas) != 2:
            return self.published
        given = self.given(overlap=False)
        cuts = range(1, len(self.profile.layers))
        return min(
            (fastest(given, self.plan.replicas, (cut,), SCHEDULES[1:]) for cut in cuts), key=step_s
        )

    def _pinned(self, family: str, schedule: str) -> Plan | None:
        pins = (*PINS, family, f"schedule={schedule}")
        given = self.given(pins, overlap=family == "pp=1")
        try:
            return search_problem(given, self.searcher, time_limit_s=600)
        except Infeasible:
            return None


def strategy(plan: Plan) -> str:
    """`DP`, `straight` or the replicas of each stage."""
    if len(plan.stages) == 1:
        return "DP"
    replicas = [stage.dp for stage in plan.stages]
    return "straight" if set(replicas) == {1} else ":".join(map(str, replicas))


def cells(folder: Path, searcher: str) -> Iterator[Cell]:
    """The 15 cells that have a profile."""
    for model, (file, batch, configs) in TABLE_4.items():
        whole = read(folder, file)
        profile = replace(whole, micro_batch=PARTS * whole.micro_batch)
        for where, (published, *_) in configs.items():
            yield Cell(model, where, profile, PARTS * batch, published, searcher)


def row(cell: Cell, whole: bool) -> str:
    """A line of the table."""
    theirs, best = step_s(cell.published), step_s(cell.kinds)
    gap = "" if cell.agrees else f"{step_s(cell.same_replicas) / best - 1:+.1%}"
    shown = [
        cell.model, cell.where, strategy(cell.published), strategy(cell.kinds),
        "yes" if cell.agrees else "no", gap, f"{theirs * 1e3:.4g}", f"{best * 1e3:.4g}",
        f"{theirs / best:.3f}", name_of(cell.kinds), f"{speedup(cell.profile, cell.kinds):.1f}",
    ]  # fmt: skip
    if whole:
        shown += [name_of(cell.free), f"{step_s(cell.published_here) / step_s(cell.free):.3f}"]
    return f"| {' | '.join(shown)} |"


_HEAD = ("model", "config", "published", "ours", "agrees", "published replicas", "published, ms",
         "ours, ms", "ratio", "plan", "speedup")  # fmt: skip
_WHOLE = ("whole space", "ratio")
_TEXT = """\
# Table 4 of DAPPLE (PPoPP 2021)

{date}, `python -m benchmarks.dapple.table4 PROFILES_DIR`, 2-core CPU machine. Predictions: no GPU
was measured. {agree} of {all} cells agree in strategy and replication. The published plan takes at
least {least:.3f} times as long as ours in the same simulator{slower}.

"""
_NOTES = """
`ratio`: step time of the published plan over that of ours, in the same simulator. The published
plan has the published replicas and split, and the best number of micro-batches and of PA and PB,
which are not published. `published replicas`: where we disagree, how much slower the best plan
with the published replicas is, cut anywhere. `speedup`: over one V100 at the profile's times.

All from the paper or its authors' files:
- link constants and 16 V100-16GB as in [dapple.md](dapple.md); schedules PA and PB; no ZeRO, no
  recompute
- the kinds of plans that the table has: data parallel, two stages, one layer group per device
- memory: a device holds `max_bs` samples of the whole model ({most})
- what crosses a cut are all live tensors, each once. XLNet's profile has an edge from the token
  embedding to the position encodings, which depend on no parameter: it is dropped. Then the ratios
  of communication to computation equal the published ones for XLNet and BERT
- as DAPPLE's planner counts: replicas share a micro-batch in parts of samples, no micro-batch is
  smaller than the profiled one, and gradients of a pipeline's stage are reduced after its last
  backward, those of data parallelism during it

The last line was added after looking at an earlier outcome: with whole samples, any micro-batch and
gradients overlapped everywhere, as in our runtime, 11 of 15 agree. Strategies disagree where two
plans are close, but for VGG-19 on C: there a second device for the last layers halves what each
link carries, which the paper's plan does without.

`whole space`, where it is shown: ZeRO, recompute, all schedules and pipelines, gradients
overlapped, against the published plan in the same runtime.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--searcher", default="auto")
    parser.add_argument("--whole", action="store_true", help="search our whole space too")
    options = parser.parse_args()
    done = []
    head = (*_HEAD, *(_WHOLE if options.whole else ()))
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for cell in cells(options.profiles, options.searcher):
        lines.append(row(cell, options.whole))
        print(lines[-1], flush=True)
        done.append(cell)
    least = min(step_s(cell.published) / step_s(cell.kinds) for cell in done)
    agree = sum(cell.agrees for cell in done)
    print(f"{agree} of {len(done)} agree; least ratio {least:.3f}")
    if options.output:
        most = ", ".join(f"{name} {count}" for name, count in MAX_SAMPLES.items())
        slower = "" if least > 0.9995 else ": there ours is slower"
        text = _TEXT.format(
            date="2026-11-22", agree=agree, all=len(done), least=least, slower=slower
        )
        options.output.write_text(text + "\n".join(lines) + "\n" + _NOTES.format(most=most))


if __name__ == "__main__":
    main()
