"""The best choices of one frame by the stage tables: cuts, devices, meshes, recomputed blocks.

The quick estimate is DAPPLE's: the path of a micro-batch through all stages, and the load of the
pivot, the stage that is busiest. For several limits of the load the shortest path is found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.cores import step_cores
from meshwright.planner.across.choice_space import DeviceGroup, stage_on
from meshwright.planner.across.partition import (
    Pipeline,
    StagePart,
    load,
    memory,
    path_within,
    solve,
    step,
)
from meshwright.planner.across.places import Places
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.across.stage_options import Few, Fitted, StageOptions
from meshwright.planner.across.stage_tables import StageTables
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.bounds.frames import Frame, group_sizes
from meshwright.planner.bounds.relaxation import Bound
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.schedule_tools import USUAL, fits, most_held
from meshwright.planner.problem.space import Mesh, meshes, schedules

LIMITS = (1.0, 1.05, 1.2, 1.6)
"""Loads tried, as multiples of the least possible one."""
LONG = 3
"""Stages on equal groups have at most so many times as many blocks as the mean."""
MESHES, NEAR = 16, 1.5
"""Meshes of even groups that are looked at closer: so many, whose bound is within this factor."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """A choice and about how good it is: seconds, or bytes where memory is what counts."""

    value: float
    choice: Choice


class FrameSearch:
    """Solves frames of one problem in one order of its devices."""

    def __init__(self, runs: RunCosts, places: Places, sets: Treatments) -> None:
        self.problem, self.runs, self.places, self.sets = runs.problem, runs, places, sets
        self.tables = StageTables(runs, places, sets)
        self.left_out = 0
        """Meshes that were not looked at closer."""
        self._meshes: dict[tuple[Frame, int], tuple[Mesh, ...]] = {}

    def fastest(
        self, frame: Frame, bound: Bound, limit_s: float, spare_bytes: float = 0.0
    ) -> list[Finalist]:
        """Choices of least estimated time, best first; some memory may be left alone."""
        asked = self._pipeline(frame, bound, spare_bytes, limit_s)
        if asked is None or self._is_long(asked, frame, limit_s):
            return []
        least = self._least(asked, frame)
        if least is None or least[0] > limit_s:
            return []
        answers = {least[1]: None}
        for factor in LIMITS if frame.num_ranks > 1 else ():
            answer = solve(asked, path_within(least[0] * factor), join=np.add)
            if answer:
                answers[answer[1]] = None
        for parts in self._splits(asked, limit_s):
            answers[parts] = None
        found = [
            Finalist(self._step_s(asked, parts, frame), choice)
            for parts in answers
            for choice in [self._choice(parts, frame)]
        ]
        return sorted(found, key=lambda item: item.value)

    def _is_long(self, asked: Pipeline, frame: Frame, limit_s: float) -> bool:
        """Whether pipelines take longer even if all activations are kept and fit: what that takes
        is quickly known."""
        if frame.num_ranks == 1 or limit_s == np.inf:
            return False
        light = replace(asked, fitted=asked.keeping)
        busiest = solve(light, load, join=np.maximum)
        path = solve(light, path_within(limit_s), join=np.add)
        return busiest is None or path is None or busiest[0] + path[0] > limit_s

    def _least(self, asked: Pipeline, frame: Frame) -> tuple[float, tuple[StagePart, ...]] | None:
        """Stages of least load; of a single one, what it takes in all."""
        return solve(asked, load if frame.num_ranks > 1 else step, join=np.maximum)

    def _splits(self, asked: Pipeline, limit_s: float) -> Iterator[tuple[StagePart, ...]]:
        """Of two stages, the best of every way to share out the devices: what tables say of them
        is close, and wrong by more than that where replicas differ."""
        for size in asked.sizes if asked.num_stages == 2 and len(asked.sizes) > 1 else ():
            answer = solve(asked.beginning_with(size), load, join=np.maximum)
            if answer and answer[0] <= limit_s:
                yield answer[1]

    def of_meshes(self, frame: Frame, found: Sequence[Mesh]) -> list[Finalist]:
        """The choice of least estimated load with these meshes alone."""
        asked = self._pipeline(frame, Bound(0.0, tuple((0.0, mesh) for mesh in found)))
        least = self._least(asked, frame) if asked else None
        if asked is None or least is None:
            return []
        value = self._step_s(asked, least[1], frame)
        return [Finalist(value, self._choice(least[1], frame))]

    def smallest(self, frame: Frame, bound: Bound) -> list[Finalist]:
        """The choice that needs least memory."""
        asked = self._pipeline(frame, bound, everything=True)
        answer = solve(asked, memory, join=np.maximum) if asked else None
        if answer is None:
            return []
        return [Finalist(answer[0], self._choice(answer[1], frame))]

    def _pipeline(
        self,
        frame: Frame,
        bound: Bound,
        spare_bytes: float = 0.0,
        limit_s: float = np.inf,
        *,
        everything: bool = False,
    ) -> Pipeline | None:
        """`limit_s`: of the load of stages; some that are longer may be left out."""
        sizes = group_sizes(self.problem, frame.num_ranks)
        if not sizes:
            return None
        best = () if everything else self._closer(bound)
        flying = most_held(self._schedule(frame), frame.num_ranks, frame.num_microbatches)
        few = self._few(frame, limit_s)
        known: dict[object, Fitted | None] = {}

        def options(first: int, size: int) -> StageOptions | None:
            found = best or self._all(frame, size)
            if not found:
                return None
            return self.tables.options(first, size, frame.num_microbatches, found)

        def keeping(_: int, first: int, size: int) -> Fitted | None:
            key = self.places.like(first, size), size, self.places.way(first, size)
            if key not in known:
                found = options(first, size)
                known[key] = found.kept() if found else None
            return known[key]

        def fitted(stage: int, first: int, size: int) -> Fitted | None:
            key = (flying[stage], self.places.like(first, size), size, self.places.way(first, size))
            if key not in known:
                found = options(first, size)
                room = self.places.room_bytes(first, size) - spare_bytes
                known[key] = few(found).fitted(flying[stage], room) if found else None
            return known[key]

        return Pipeline(
            classes=self.runs.classes, num_blocks=len(self.problem.graph.blocks),
            num_devices=self.problem.cluster.num_devices, num_stages=frame.num_ranks,
            sizes=sizes, fitted=fitted, keeping=keeping,
            pins=self.problem.stage_of_block if self._one_stage() else {},
        )  # fmt: skip

    def _few(self, frame: Frame, limit_s: float) -> Callable[[StageOptions], StageOptions | Few]:
        """Of options, those of runs that stages may have: not too long, nor too much work even
        where all activations are kept."""
        known: dict[int, StageOptions | Few] = {}
        short = self._runs(frame)

        def few(options: StageOptions) -> StageOptions | Few:
            if id(options) not in known:  # tables keep them
                light = options.keep.load_s.min(axis=0) <= limit_s
                if short is not None:
                    light &= short
                known[id(options)] = options if light.all() else options.few(np.flatnonzero(light))
            return known[id(options)]

        return few

    def _runs(self, frame: Frame) -> NDArray[np.bool_] | None:
        """Whether a stage may have runs of blocks of a kind; None for all. Where all groups are
        equal, none of them gets several times as many blocks as others."""
        if len(group_sizes(self.problem, frame.num_ranks)) > 1:
            return None
        classes, blocks = self.runs.classes, len(self.problem.graph.blocks)
        most = LONG * ceil(blocks / frame.num_ranks) + 2
        if self.problem.stage_of_block or most >= blocks:
            return None
        found: NDArray[np.bool_] = classes.stop - classes.start <= most
        return found

    def _closer(self, bound: Bound) -> tuple[Mesh, ...]:
        """Meshes that may be best, of those that a bound is known for."""
        if not bound.meshes:
            return ()
        least = bound.meshes[0][0]
        near = [mesh for value, mesh in bound.meshes if value <= NEAR * least]
        self.left_out += max(0, len(bound.meshes) - min(len(near), MESHES))
        return tuple(near[:MESHES])

    def _all(self, frame: Frame, size: int) -> tuple[Mesh, ...]:
        if (frame, size) not in self._meshes:
            samples = self.problem.batch // frame.num_microbatches
            self._meshes[frame, size] = tuple(meshes(self.problem, size, samples))
        return self._meshes[frame, size]

    def _one_stage(self) -> bool:
        """Whether pins leave schedules of one stage per rank."""
        asked = pinned(self.problem.constraints, "schedule")
        known = schedules(self.problem, 1)
        return asked is None or any(chunks == 1 for _, chunks in known)

    def _schedule(self, frame: Frame) -> str:
        """The usual schedule, or the first of those that pins leave."""
        ranks, count = frame.num_ranks, frame.num_microbatches
        names = [
            name
            for name, chunks in schedules(self.problem, ranks)
            if chunks == 1 and fits(name, ranks, count, ranks)
        ]
        return names[0] if names and USUAL not in names else USUAL

    def _step_s(self, asked: Pipeline, parts: Sequence[StagePart], frame: Frame) -> float:
        """About the step time of these stages."""
        path = most = work = 0.0
        for stage, part in enumerate(parts):
            fitted = asked.fitted(stage, part.first, part.mesh.size)
            assert fitted
            mesh = fitted.options.meshes.index(part.mesh)
            at = mesh, asked.classes.index[part.start, part.stop]
            path_s, load_s, busy_s = (float(held[at]) for held in fitted[2:5])
            path, most = path + path_s, max(most, load_s)
            work += (load_s + busy_s) * part.mesh.size
        return max(path + most, work / step_cores(self.problem.cluster))

    def _choice(self, parts: Sequence[StagePart], frame: Frame) -> Choice:
        return Choice(
            stages=tuple(map(self._stage, parts)), num_microbatches=frame.num_microbatches,
            schedule=self._schedule(frame), num_ranks=frame.num_ranks,
        )  # fmt: skip

    def _stage(self, part: StagePart) -> StageChoice:
        devices = self.places.ranks(part.first, part.mesh.size, part.mesh)
        treatment = self.sets.that_saves(part.start, part.stop, part.saved)
        return stage_on(DeviceGroup(devices, part.mesh), part.start, part.stop, treatment)
