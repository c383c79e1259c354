"""A pipeline in the making, and the whole choice that it would be if nothing more were decided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import log2

import numpy as np

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.across.ladder import Treatment
from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.refine import treated
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.bounds.leaf_bound import LeafBound
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import Mesh, meshes
from meshwright.planner.searchers.dqn.decisions import Floats
from meshwright.planner.searchers.dqn.loads import Loads, StageLoad

SHORT = 6
"""Meshes of a number of devices that a stage tries when nothing is decided."""
SUMMARY = (
    "log of the least step over the reference", "the same with the exchange of gradients",
    "exchange over the least step", "memory of the fullest stage, of its room, at most 3",
    "is too large", "longest stage over the mean, - 1", "share of the bubble", "ranks / 16",
    "log2 micro-batches / 10", "log2 replicas / 6", "log2 ranks of a replica / 6", "ZeRO / 3",
    "gathers ahead", "other layouts", "several model axes", "log2 replicas of the last stage / 6",
    "devices of the last stage, share", "blocks of the last stage, share",
    "how much is recomputed or moved", "several stages per rank",
    "log2 samples of a replica and micro-batch / 6",
)  # fmt: skip
"""What is told of a choice; where no stage is named, of the first."""
FIT = "fit"
"""Recompute as little as lets a stage fit, by the estimate."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided so far."""

    count: int = 0
    """Micro-batches; 0 while that is open."""
    order: int | None = None
    """In which order stages take devices; like all below, None while that is open."""
    ends: tuple[tuple[int, int], ...] = ()
    """(end, devices) of stages that are cut off; the rest is the last stage."""
    stopped: bool = False
    meshes: tuple[tuple[int, Mesh], ...] = ()
    """Per number of devices."""
    recompute: str | float | None = None
    """`FIT`, or which part of the blocks."""


class Sketches:
    """Drafts of one problem as choices, with what is estimated of them; kept once made."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.runs, self.sets = RunCosts(problem), Treatments(problem)
        self.leaf = LeafBound(self.runs)
        self.loaded = Loads(self.runs)
        self.load = self.loaded.of
        self.places = [Places(problem, order) for order in orders(problem)]
        self.short = cache(self._short)
        self.smallest = cache(self._smallest)
        self.stage = cache(self._stage)
        self.choice = cache(self._choice)
        self.summary = cache(self._summary)

    @cached_property
    def block_s(self) -> tuple[float, ...]:
        """Of each block, alone on the first device."""
        spot = BlockSpot(1, 1, (), self.problem.tables.device_names[0], (), ())
        costs = self.runs.block_costs(At(spot, ""))
        return tuple(cost.forward_s + cost.backward_s for cost in costs)

    def ranked(self, size: int, count: int) -> list[Mesh]:
        """Meshes of so many devices, the best for the whole model first."""
        samples, blocks = self.problem.batch // count, len(self.problem.graph.blocks)
        found = list(meshes(self.problem, size, samples))
        start = self.places[0]
        loads = [
            self.load(_on(mesh, 0, blocks, start.ranks(0, size, mesh)), count, 1) for mesh in found
        ]
        order = sorted(range(len(found)), key=lambda i: (loads[i].cost_s, i))
        return [found[i] for i in order]

    def _short(self, size: int, count: int) -> tuple[Mesh, ...]:
        return tuple(self.ranked(size, count)[:SHORT])

    def _stage(
        self, ends: tuple[int, int], first: int, size: int, draft: Draft, behind: int
    ) -> StageChoice | None:
        """The stage on its mesh, or on the best of a few; None where there is no mesh."""
        held = dict(draft.meshes)
        found = (held[size],) if size in held else self.short(size, draft.count)
        in_flight = min(draft.count, behind + 1)
        made = [
            self._recomputed(
                _on(mesh, *ends, self.places[draft.order or 0].ranks(first, size, mesh)),
                draft, in_flight,
            )
            for mesh in found
        ]  # fmt: skip
        best = min(
            range(len(made)),
            key=lambda i: (self.load(made[i], draft.count, in_flight).cost_s, i),
            default=None,
        )
        return None if best is None else made[best]

    def _recomputed(self, stage: StageChoice, draft: Draft, in_flight: int) -> StageChoice:
        known = self.sets.of(stage.start, stage.stop)
        if isinstance(draft.recompute, float):
            return treated(stage, known[round(draft.recompute * (len(known) - 1))])
        if self.load(treated(stage, known[0]), draft.count, in_flight).memory <= 1:
            return treated(stage, known[0])
        low, high = 1, len(known) - 1
        while low < high:
            middle = (low + high) // 2
            if self.load(treated(stage, known[middle]), draft.count, in_flight).memory <= 1:
                high = middle
            else:
                low = middle + 1
        return treated(stage, known[min(low, len(known) - 1)])

    def _choice(self, draft: Draft) -> Choice | None:
        """The whole choice; None if a stage has no mesh."""
        devices = self.problem.cluster.num_devices
        sizes = [size for _, size in draft.ends]
        rest = devices - sum(sizes)
        ends = [0, *(end for end, _ in draft.ends), len(self.problem.graph.blocks)]
        firsts = [0, *accumulate(sizes)]
        stages = [
            self.stage(pair, first, size, _of_stage(draft), len(sizes) - i)
            for i, (pair, first, size) in enumerate(
                zip(pairwise(ends), firsts, [*sizes, rest], strict=True)
            )
        ]
        if any(stage is None for stage in stages):
            return None
        return Choice(
            stages=tuple(stage for stage in stages if stage), num_microbatches=draft.count,
            schedule=USUAL, num_ranks=len(stages),
        )  # fmt: skip

    def least_state(self, start: int, stop: int, draft: Draft) -> float:
        """Of the room, what parameters of blocks take at least on the last group cut off."""
        first = sum(size for _, size in draft.ends[:-1])
        size, places = draft.ends[-1][1], self.places[draft.order or 0]
        return min(
            self.loaded.state(_on(mesh, start, stop, places.ranks(first, size, mesh)))
            for mesh in self.smallest(size, draft.count)
        )

    def _smallest(self, size: int, count: int) -> tuple[Mesh, ...]:
        """Of each model mesh with its layouts, the one that shards state most."""
        found: dict[tuple[ModelMesh, str], Mesh] = {}
        for mesh in meshes(self.problem, size, self.problem.batch // count):
            held = found.setdefault((mesh.model, mesh.variant), mesh)
            if (mesh.zero, mesh.dp_shard) > (held.zero, held.dp_shard):
                found[mesh.model, mesh.variant] = mesh
        return tuple(found.values())

    def loads(self, choice: Choice) -> list[StageLoad]:
        """Per stage."""
        count, ranks = choice.num_microbatches, choice.num_ranks
        return [
            self.load(stage, count, min(count, max(1, ranks - i)))
            for i, stage in enumerate(choice.stages)
        ]

    def _summary(self, choice: Choice) -> Floats:
        """Numbers of a choice that mean the same for models of all sizes."""
        loads = self.loads(choice)
        busy = np.array([load.busy_s for load in loads])
        sync = max(load.sync_s for load in loads)
        leaf_s = self.leaf.seconds(choice)
        memory = max(load.memory for load in loads)
        ranks, count = choice.num_ranks, choice.num_microbatches
        first, last = choice.stages[0], choice.stages[-1]
        blocks, devices = len(self.runs.blocks), self.problem.cluster.num_devices
        reference = self.reference_s
        return np.array([
            np.log(leaf_s / reference), np.log((leaf_s + sync) / reference), sync / leaf_s,
            min(memory, 3.0), float(memory > 1), busy.max() / busy.mean() - 1,
            (ranks - 1) / (ranks - 1 + count), ranks / 16, log2(count) / 10,
            _axis(first.dp), _axis(len(first.devices) // first.dp), first.zero / 3,
            float(bool(first.prefetch)), float(bool(first.variant)), float(len(first.model) > 1),
            _axis(last.dp), len(last.devices) / devices, (last.stop - last.start) / blocks,
            np.mean([_part_again(self, stage) for stage in choice.stages]),
            float(len(choice.stages) > ranks), _axis(self.problem.batch // count // first.dp),
        ], np.float32)  # fmt: skip

    @cached_property
    def reference_s(self) -> float:
        """The work of the whole batch shared out evenly over all devices."""
        return sum(self.block_s) * self.problem.batch / self.problem.cluster.num_devices

    def shifted(self, choice: Choice, change: int) -> Choice:
        """With treatments of all stages so many steps further."""
        stages = tuple(
            treated(s, self.sets.near(s.start, s.stop, Treatment.of(s), change))
            for s in choice.stages
        )
        return replace(choice, stages=stages)

    def refitted(self, choice: Choice) -> Choice:
        """With as little recomputed or moved in each stage as fits, by the estimate."""
        count, ranks = choice.num_microbatches, choice.num_ranks
        draft = Draft(count, recompute=FIT)
        stages = tuple(
            self._recomputed(stage, draft, min(count, max(1, ranks - i)))
            for i, stage in enumerate(choice.stages)
        )
        return replace(choice, stages=stages)


def _axis(size: int) -> float:
    return log2(max(1, size)) / 6


def _part_again(sketches: Sketches, stage: StageChoice) -> float:
    known = sketches.sets.of(stage.start, stage.stop)
    now = Treatment.of(stage)
    at = known.place(now)
    return at / max(1, len(known) - 1)


def _of_stage(draft: Draft) -> Draft:
    """The part of a draft that a stage depends on."""
    return Draft(draft.count, draft.order, meshes=draft.meshes, recompute=draft.recompute)


def _on(mesh: Mesh, start: int, stop: int, devices: Sequence[int]) -> StageChoice:
    return StageChoice(
        start=start, stop=stop, devices=tuple(devices), dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard, model=mesh.model, variant=mesh.variant, zero=mesh.zero,
        prefetch=mesh.prefetch,
    )  # fmt: skip
