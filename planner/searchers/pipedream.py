"""PipeDream's planner (SOSP 2019, arXiv:1806.03377, section 3.1): a baseline for the others.

A dynamic program per level of the machines, the inner one first. On level k, blocks i to j run on
m units (devices, or groups that the level below has planned) in

    A(i..j, m) = min of T(i..j, m) and, for all s, n, max(A(i..s, m - n), 2 a_s / B, T(s+1..j, n))
    T(i..j, n) = max(time of i..j in a unit, 4 (n - 1) / n |w| / B) / n

with a_s what block s sends and |w| the weights: seconds per micro-batch of the slowest stage or
link. Memory counts a version of the weights for every micro-batch in flight. PipeDream's own
asynchronous pipeline is not offered: the plan runs as 1F1B, with every number of micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.comm.comm import send_time
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.updates import update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import Link
from meshwright.planner.across.spans import Matrix, sums, sums_of_named
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.problem.candidates import Choice, StageChoice, build_plan
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import microbatch_counts
from meshwright.planner.search.offers import Offer

BASELINE = "it minimises a closed form for an asynchronous pipeline, without ZeRO, tp or recompute"
"""Why it need not come close to the best plan."""


def search(problem: Problem) -> Iterator[Offer]:
    """One plan for each number of micro-batches."""
    schedule = str(pinned(problem.constraints, "schedule") or USUAL)
    for count in microbatch_counts(problem):
        stages = stages_of(problem, problem.batch // count)
        if not stages:
            yield Offer(infeasible=1)
            continue
        choice = Choice(
            stages=stages, num_microbatches=count, schedule=schedule, num_ranks=len(stages)
        )
        yield Offer(plan=build_plan(problem, choice))


def stages_of(problem: Problem, samples: int) -> tuple[StageChoice, ...]:
    """PipeDream's stages for micro-batches of so many samples; none if nothing fits."""
    runs = _Runs(problem, samples)
    solved: list[_Level] = []
    for units in units_of(problem.cluster):
        solved.append(_Level(runs, units, solved[-1] if solved else None))
    blocks = len(problem.graph.blocks)
    if not np.isfinite(solved[-1].value[-1][0, blocks]):
        return ()
    return tuple(
        StageChoice(start=start, stop=stop, devices=ranks, dp_replicate=len(ranks))
        for start, stop, ranks in _unfold(
            solved, 0, blocks, [tuple(range(problem.cluster.num_devices))]
        )
    )


@dataclass(frozen=True, slots=True)
class Units:
    """What one level joins: `count` units of `inside` devices each."""

    count: int
    inside: int
    link: Link

    @property
    def rate(self) -> float:
        """Bytes per second between two units; all devices of a unit send at once."""
        return self.link.rate * self.inside


def units_of(cluster: Cluster) -> tuple[Units, ...]:
    """The levels of a cluster, the innermost first; a single one if its nodes differ in size."""
    devices, nodes = cluster.num_devices, cluster.num_nodes
    size = devices // nodes
    if nodes == 1 or size == 1 or any(len(node.devices) != size for node in cluster.nodes):
        return (Units(devices, 1, cluster.tier(range(devices))),)
    between = cluster.tier(range(0, devices, size))
    return Units(size, 1, cluster.tier(range(size))), Units(nodes, size, between)


def _unfold(
    solved: Sequence["_Level"], start: int, stop: int, groups: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(first block, end, ranks) of stages, where each group of ranks runs what the last of the
    levels has planned for these blocks."""
    *inner, level = solved
    size, used = level.units.inside, 0
    for begin, end, count in level.parts(start, stop):
        units = range(used, used + count)
        held = [group[u * size : (u + 1) * size] for group in groups for u in units]
        used += count
        if inner:
            yield from _unfold(inner, begin, end, held)
        else:
            yield begin, end, tuple(chain.from_iterable(held))


class _Runs:
    """Figures of all runs of blocks at one size of micro-batch: entry [i, k] is of i to k-1."""

    def __init__(self, problem: Problem, samples: int) -> None:
        tables, blocks = problem.tables, problem.graph.blocks
        names = dict.fromkeys(tables.device_names)
        slowest = min(names, key=lambda name: tables.devices[name].peak("bfloat16"))
        spot = BlockSpot(samples, 1, (), slowest, (), ())
        layouts = {layout.pattern: layout for layout in problem.layouts(())}
        costs = [tables.block(block, layouts[block.pattern], spot) for block in blocks]
        weights, frozen = (
            [
                {n: size for n, size in zip(block.params, cost.param_bytes, strict=True)
                 if n in names}
                for block, cost in zip(blocks, costs, strict=True)
            ]
            for names in (tables.trained, tables.frozen)
        )  # fmt: skip
        self.problem, self.samples, self.size = problem, samples, len(blocks) + 1
        self.busy_s = sums([cost.forward_s + cost.backward_s for cost in costs])
        self.saved_bytes = sums([cost.saved_bytes + sum(cost.saved_inputs) for cost in costs])
        self.weight_bytes, self.frozen_bytes = sums_of_named(weights), sums_of_named(frozen)
        self.room_bytes = problem.room_bytes(tuple(range(problem.cluster.num_devices)))

    def send_s(self, link: Link) -> Matrix:
        """Per block, what enters it and the gradient of that; nothing at the two ends."""
        found = np.zeros(self.size)
        for block in range(1, self.size - 1):
            for back in (False, True):
                whole, fixed = self.problem.tables.border_bytes(block, back=back)
                if nbytes := whole * self.samples / self.problem.batch + fixed:
                    found[block] += send_time(nbytes, link)
        return found

    def fits(self, replicas: int, behind: int) -> NDArray[np.bool_]:
        """Runs that fit into each of `replicas` devices, with as many behind them in the pipeline:
        a version of the weights, and a share of the activations, per micro-batch in flight."""
        in_flight = ceil((behind + replicas) / replicas)
        copies = 1 + update(self.problem.optimizer).copies
        weights = (in_flight + copies) * self.weight_bytes + self.frozen_bytes
        needed = weights + in_flight * self.saved_bytes / replicas
        found: NDArray[np.bool_] = needed <= self.room_bytes
        return found


class _Level:
    """A(i..j, m) of one level for all runs of blocks and numbers of units, and its stages."""

    def __init__(self, runs: _Runs, units: Units, inner: "_Level | None") -> None:
        self.runs, self.units = runs, units
        self.inner_s: Matrix = inner.value[-1] if inner else runs.busy_s
        self.inner_replicas: Matrix = inner.replicas[-1] if inner else np.ones_like(runs.busy_s)
        self.sent_s = runs.send_s(units.link)
        shape = (units.count + 1, runs.size, runs.size)
        self.value: Matrix = np.full(shape, np.inf)
        self.replicas: Matrix = np.ones(shape)
        """Of the stage that has most."""
        self.cut = np.zeros(shape, dtype=np.int64)
        """Where the last stage begins."""
        self.last = np.zeros(shape, dtype=np.int64)
        """Units of the last stage."""
        for count in range(1, units.count + 1):
            self._solve(count)

    def _stage_s(self, count: int, behind: int) -> Matrix:
        """T(i..j, count), infinite where it is not legal; `behind`: units of later stages."""
        runs = self.runs
        moved = 4 * (count - 1) / count * runs.weight_bytes
        seconds = np.maximum(self.inner_s, moved / self.units.rate) / count
        legal = np.tri(runs.size, k=-1, dtype=bool).T
        legal &= count * self.inner_replicas <= runs.samples
        if self.units.inside == 1:
            legal &= runs.fits(count, behind)
        return np.where(legal, seconds, np.inf)

    def _solve(self, count: int) -> None:
        behind = self.units.count - count
        self.value[count] = self._stage_s(count, behind)
        self.cut[count] = np.arange(self.runs.size)[:, None]
        self.last[count] = count
        self.replicas[count] = count * self.inner_replicas
        for last in range(1, count):
            stage_s = self._stage_s(last, behind)
            for start in range(self.runs.size - 1):
                self._split(count, last, start, stage_s)

    def _split(self, count: int, last: int, start: int, stage_s: Matrix) -> None:
        """Blocks from `start` on with a last stage of `last` units, where that is faster."""
        before_s = np.maximum(self.value[count - last, start], self.sent_s)
        joined = np.maximum(before_s[start:, None], stage_s[start:, start:])
        cut, value = joined.argmin(axis=0) + start, joined.min(axis=0)
        better = np.flatnonzero(value < self.value[count, start, start:])
        ends, cuts = better + start, cut[better]
        self.value[count, start, ends] = value[better]
        self.cut[count, start, ends] = cuts
        self.last[count, start, ends] = last
        self.replicas[count, start, ends] = np.maximum(
            self.replicas[count - last, start, cuts], last * self.inner_replicas[cuts, ends]
        )

    def parts(self, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        """(first block, end, units) of the stages of some blocks on all units."""
        count, found = self.units.count, []
        while stop > start:
            cut, last = int(self.cut[count, start, stop]), int(self.last[count, start, stop])
            found.append((cut, stop, last))
            count, stop = count - last, cut
        return tuple(reversed(found))
