"""Plain choices: all ranks on one kind of mesh, blocks shared out evenly by their time.

Tables leave out what only the simulator sees, and may misjudge what is simple; so the best of these
are always simulated.
"""

from collections.abc import Iterator
from math import ceil

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.problem.candidates import Choice, StageChoice, even_cuts, recomputable
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import Mesh, meshes, recompute_modes


def plain_choices(runs: RunCosts, frame: Frame) -> Iterator[Choice]:
    """Those of one frame; none where its ranks cannot have equal groups."""
    problem, ranks = runs.problem, frame.num_ranks
    devices = problem.cluster.num_devices
    if devices % ranks:
        return
    size, samples = devices // ranks, problem.batch // frame.num_microbatches
    found = [mesh for mesh in meshes(problem, size, samples) if _is_plain(mesh)]
    least = min((mesh.model_size for mesh in found), default=1)
    for mesh in found:
        if mesh.model_size == least:
            for again in recompute_modes(problem):
                yield _choice(runs, frame, mesh, again)


def _is_plain(mesh: Mesh) -> bool:
    """One axis of replicas, and at most one inside a replica."""
    one = 1 in (mesh.dp_replicate, mesh.dp_shard) and len(mesh.model) <= 1
    return one and not (mesh.variant or mesh.prefetch or mesh.dp_inside)


def _choice(runs: RunCosts, frame: Frame, mesh: Mesh, again: bool) -> Choice:
    problem, blocks = runs.problem, runs.blocks
    samples = ceil(problem.batch / frame.num_microbatches / mesh.dp)
    times = _times(runs, samples, mesh)
    starts = (0, *even_cuts(times, frame.num_ranks), len(blocks))
    return Choice(
        stages=tuple(
            _stage(problem, starts[rank : rank + 2], rank, mesh, again)
            for rank in range(frame.num_ranks)
        ),
        num_microbatches=frame.num_microbatches,
        schedule=USUAL,
        num_ranks=frame.num_ranks,
    )


def _stage(
    problem: Problem, ends: tuple[int, ...], rank: int, mesh: Mesh, again: bool
) -> StageChoice:
    blocks = problem.graph.blocks[ends[0] : ends[1]]
    return StageChoice(
        start=ends[0], stop=ends[1],
        devices=tuple(range(rank * mesh.size, (rank + 1) * mesh.size)),
        dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, model=mesh.model, zero=mesh.zero,
        recompute=recomputable(problem.graph, blocks) if again else (),
    )  # fmt: skip


def _times(runs: RunCosts, samples: int, mesh: Mesh) -> list[float]:
    """Seconds of each block on the first devices."""
    tables, width = runs.problem.tables, mesh.model_size
    levels = tables.model_levels(tuple(range(width)), mesh.model)
    replicas = tables.levels(tuple(range(0, mesh.size, width)))
    spot = BlockSpot(
        samples, mesh.dp, mesh.model, tables.device_names[0], replicas, levels,
        own_levels=mesh.own_levels(tables, range(mesh.size)),
    )  # fmt: skip
    return runs.block_s(At(spot, ""))
