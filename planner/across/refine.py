"""Choices one small step away from a given one, for polishing what a searcher has found."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.across.choice_space import with_shares
from meshwright.planner.across.ladder import Treatment
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.inside.variants import takes
from meshwright.planner.problem.candidates import (
    Choice,
    StageChoice,
    block_flops,
    even_cuts,
    recomputable,
)
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import fits, make_schedule
from meshwright.planner.problem.space import (
    Mesh,
    meshes,
    microbatch_counts,
    schedules,
)

FEW_DEVICES = 16
"""Up to here every mesh of every single stage is a neighbour."""


def neighbours(
    problem: Problem, choice: Choice, sets: Treatments, *, tight: bool
) -> Iterator[Choice]:
    """Other cuts, treatments, schedules, micro-batch counts, meshes; pins respected. `tight`:
    whether stages that keep all may want less memory."""
    yield from other_schedules(problem, choice)
    yield from _other_cuts(choice)
    yield from _other_treatments(choice, sets, tight=tight)
    for other in _other_counts(problem, choice):
        if fits(other.schedule, len(other.stages), other.num_microbatches, other.num_ranks):
            yield other
    yield from _other_meshes(problem, choice)


def other_schedules(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """The same pipeline ranks under each schedule; those with several stages per rank cut anew."""
    per_rank = len(choice.stages) // choice.num_ranks
    table = choice.table()
    held = {table.rank_of(i): stage for i, stage in reversed([*enumerate(choice.stages)])}
    for name, chunks in schedules(problem, choice.num_ranks):
        if (name, chunks) == (choice.schedule, per_rank):
            continue
        if not fits(name, chunks * choice.num_ranks, choice.num_microbatches, choice.num_ranks):
            continue
        if chunks == per_rank == 1:
            yield replace(choice, schedule=name)
        else:
            yield _recut(problem, choice, held, name, chunks)


def _recut(
    problem: Problem, choice: Choice, held: dict[int, StageChoice], name: str, chunks: int
) -> Choice:
    num_stages, graph = choice.num_ranks * chunks, problem.graph
    table = make_schedule(name, num_stages, choice.num_microbatches, choice.num_ranks)
    cuts = (0, *even_cuts(block_flops(graph), num_stages), len(graph.blocks))
    stages = []
    for i in range(num_stages):
        old = held[table.rank_of(i)]
        again = recomputable(graph, graph.blocks[cuts[i] : cuts[i + 1]])
        now = Treatment.of(old)
        new = Treatment() if now.is_plain else Treatment(again)
        stages.append(replace(treated(old, new), start=cuts[i], stop=cuts[i + 1]))
    return replace(choice, stages=tuple(stages), schedule=name)


def _with(choice: Choice, index: int, *new: StageChoice) -> Choice:
    stages = (*choice.stages[:index], *new, *choice.stages[index + len(new) :])
    return replace(choice, stages=stages)


def _other_cuts(choice: Choice) -> Iterator[Choice]:
    for i, (left, right) in enumerate(zip(choice.stages, choice.stages[1:], strict=False)):
        for cut in (left.stop - 1, left.stop + 1):
            if left.start < cut < right.stop:
                yield _with(choice, i, replace(left, stop=cut), replace(right, start=cut))


def _other_treatments(choice: Choice, sets: Treatments, *, tight: bool) -> Iterator[Choice]:
    for i, stage in enumerate(choice.stages):
        now = Treatment.of(stage)
        if now.is_plain and not tight:
            continue
        known = sets.of(stage.start, stage.stop)
        at = known.place(now)
        near = {0, at - 1, at + 1, len(known) - 1} - {at}
        for index in sorted(n for n in near if 0 <= n < len(known)):
            yield _with(choice, i, treated(stage, known[index]))


def treated(stage: StageChoice, treatment: Treatment) -> StageChoice:
    """The stage with that done to its activations."""
    return replace(stage, recompute=treatment.recompute, saved=treatment.saved)


def _other_counts(problem: Problem, choice: Choice) -> Iterator[Choice]:
    kinds = {(stage.dp, stage.model, stage.variant) for stage in choice.stages}
    counts = [
        n
        for n in microbatch_counts(problem)
        if all(takes(*kind, problem.batch // n) for kind in kinds)
    ]
    if choice.num_microbatches in counts:
        at = counts.index(choice.num_microbatches)
        # Shares are of a micro-batch of the other size.
        stages = tuple([replace(stage, shares=()) for stage in choice.stages])
        for count in counts[max(0, at - 1) : at] + counts[at + 1 : at + 2]:
            yield from with_shares(problem, replace(choice, num_microbatches=count, stages=stages))


def _on(stage: StageChoice, mesh: Mesh) -> StageChoice:
    return replace(
        stage, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, model=mesh.model,
        variant=mesh.variant, zero=mesh.zero, prefetch=mesh.prefetch, shares=(),
    )  # fmt: skip


def _other_meshes(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """All stages of one pipeline rank on another mesh of as many devices, and all ranks at once."""
    samples = problem.batch // choice.num_microbatches
    groups = list(dict.fromkeys(stage.devices for stage in choice.stages))
    changed: list[tuple[tuple[int, ...], ...]] = []
    if problem.cluster.num_devices <= FEW_DEVICES:
        changed += [(group,) for group in groups]
    if len({len(group) for group in groups}) == 1 and len(groups) > 1:
        changed.append(tuple(groups))
    elif len(groups) == 1:
        changed.append(tuple(groups))
    for touched in dict.fromkeys(changed):
        for mesh in meshes(problem, len(touched[0]), samples):
            stages = tuple(
                _on(stage, mesh) if stage.devices in touched else stage for stage in choice.stages
            )
            if stages != choice.stages:
                yield from with_shares(problem, replace(choice, stages=stages))
