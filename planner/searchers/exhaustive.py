"""Every plan of a small instance: the oracle that other searchers are tested against.

All contiguous partitions of the blocks, all ways to share out the devices among pipeline ranks
(uneven ones too), all meshes, ZeRO levels, recompute per stage, micro-batch counts, schedules.
"""

from collections.abc import Iterator
from itertools import accumulate, product

from meshwright.ir.errors import PlanError
from meshwright.planner.candidates import Choice, StageChoice, build_plan, recomputable
from meshwright.planner.obey import obey
from meshwright.planner.offers import Offer
from meshwright.planner.problem import Problem
from meshwright.planner.schedule_tools import make_schedule
from meshwright.planner.space import (
    Mesh,
    compositions,
    cuts,
    meshes,
    microbatch_counts,
    pipeline_sizes,
    recompute_modes,
    schedules,
)

MOST = 100_000
"""Choices that are still enumerated."""


def search(problem: Problem) -> Iterator[Offer]:
    """All choices, small pipelines first."""
    total = count(problem, MOST)
    if total > MOST:
        raise PlanError(
            f"more than {MOST} plans: too many to try all; use searcher='dp', or pin decisions "
            "such as pp or num_microbatches"
        )
    for choice in choices(problem):
        yield Offer(plan=build_plan(problem, obey(problem, choice)))


def count(problem: Problem, most: int) -> int:
    """How many choices there are; stops soon after `most`."""
    total = 0
    modes = len(recompute_modes(problem))
    for pp, num_microbatches, _, chunks in _frames(problem):
        ways = 0
        for sizes in compositions(problem.cluster.num_devices, pp):
            product_of_meshes = 1
            for size in sizes:
                product_of_meshes *= sum(
                    1 for _ in meshes(problem, size, problem.batch // num_microbatches)
                )
            ways += product_of_meshes
            if total + ways > most:
                return total + ways
        again: int = modes ** (pp * chunks)
        for _ in cuts(problem, pp * chunks) if ways else ():
            total += ways * again
            if total > most:
                return total
    return total


def choices(problem: Problem) -> Iterator[Choice]:
    """Every choice of the space, in a fixed order."""
    for pp, num_microbatches, schedule, chunks in _frames(problem):
        samples = problem.batch // num_microbatches
        for sizes in compositions(problem.cluster.num_devices, pp):
            options = [tuple(meshes(problem, size, samples)) for size in sizes]
            for held in product(*options):
                yield from _cut(problem, held, pp * chunks, schedule, num_microbatches)


def _frames(problem: Problem) -> Iterator[tuple[int, int, str, int]]:
    for pp in pipeline_sizes(problem):
        for num_microbatches in microbatch_counts(problem):
            for schedule, chunks in schedules(problem, pp):
                yield pp, num_microbatches, schedule, chunks


def _cut(
    problem: Problem,
    held: tuple[Mesh, ...],
    num_stages: int,
    schedule: str,
    num_microbatches: int,
) -> Iterator[Choice]:
    table = make_schedule(schedule, num_stages, num_microbatches, len(held))
    owners = [table.rank_of(stage) for stage in range(num_stages)]
    ends = list(accumulate(mesh.size for mesh in held))
    for bounds in cuts(problem, num_stages):
        for again in product(recompute_modes(problem), repeat=num_stages):
            yield Choice(
                stages=tuple(
                    _stage(problem, bounds[i : i + 2], held[r], ends[r], again[i])
                    for i, r in enumerate(owners)
                ),
                num_microbatches=num_microbatches,
                schedule=schedule,
                num_ranks=len(held),
            )


def _stage(
    problem: Problem, bounds: tuple[int, ...], mesh: Mesh, end: int, again: bool
) -> StageChoice:
    start, stop = bounds
    blocks = problem.graph.blocks[start:stop]
    return StageChoice(
        start=start, stop=stop, devices=tuple(range(end - mesh.size, end)),
        dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, model=mesh.model,
        variant=mesh.variant, zero=mesh.zero,
        recompute=recomputable(problem.graph, blocks) if again else (),
    )  # fmt: skip
