"""A schedule for the stages of a plan, where that is worth while: the task of a choice, and the
choice with the schedule made for it."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.costmodel.estimate import Estimate, estimate_all
from meshwright.costmodel.placement import slowdown
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan import RankMemory
from meshwright.ir.schedule import Schedule
from meshwright.planner.candidates import Choice, build_plan
from meshwright.planner.constraints import pinned
from meshwright.planner.predict import excess_bytes
from meshwright.planner.problem import Problem
from meshwright.planner.schedule_tools import SCHEDULES, make_schedule, stages_per_rank
from meshwright.planner.synthesis.bound import bound_s
from meshwright.planner.synthesis.solve import NAME, synthesise
from meshwright.planner.synthesis.task import Task, peaks_bytes

WORTH = 0.02
"""A schedule this close to the bound is left as it is."""
MOST = 20_000
"""Actions of the longest schedules that are made."""
TRIES = 3
"""Memory of a task is linear in what is in flight, that of a plan nearly: tries until it fits."""


def synthesised(problem: Problem, choice: Choice, *, effort: float = 1.0) -> Choice | None:
    """The choice under a schedule made for it; None if none is better, or a schedule is pinned.

    Where processes share cores the order of actions hardly matters: None.
    """
    actions = 3 * len(choice.stages) * choice.num_microbatches
    if choice.num_ranks == 1 or choice.num_microbatches == 1 or actions > MOST:
        return None
    asked = pinned(problem.constraints, "schedule")
    if asked not in (None, NAME) or slowdown(problem.cluster) > 1.0:
        return None
    plan = build_plan(problem, choice)
    assert plan.predicted
    excess = excess_bytes(problem, plan)
    found = estimate_all(problem.graph, problem.cluster, plan, problem.tables)
    task = task_of(problem, choice, found)
    try:
        least_s = bound_s(task)
    except Infeasible:
        return None
    if not excess and found.stepped.timeline.step_s <= least_s * (1 + WORTH):
        return None
    before = (float(excess), plan.predicted.step_s)
    return _within(problem, choice, task, before, effort)


def _within(
    problem: Problem, choice: Choice, task: Task, before: tuple[float, float], effort: float
) -> Choice | None:
    """The choice with a schedule whose whole plan fits and is quicker."""
    for _ in range(TRIES):
        try:
            schedule = synthesise(task, files(task), effort=effort).schedule
        except Infeasible:
            return None
        made = with_schedule(choice, schedule)
        plan = build_plan(problem, made)
        assert plan.predicted
        excess = excess_bytes(problem, plan)
        if not excess:
            return made if (0.0, plan.predicted.step_s) < before else None
        task = replace(task, capacity_bytes=tuple(room - excess for room in task.capacity))
    return None


def with_schedule(choice: Choice, schedule: Schedule) -> Choice:
    """The choice under that schedule: by name if it is one of the files, else row by row."""
    rows = () if schedule.name in SCHEDULES else tuple(str(schedule).splitlines())
    return replace(choice, schedule=schedule.name, rows=rows)


def files(task: Task) -> Iterator[Schedule]:
    """The schedules of files with the task's placement of stages."""
    num_stages = len(task.stages)
    chunks = num_stages // task.num_ranks
    for name in SCHEDULES:
        if num_stages % task.num_ranks or chunks not in stages_per_rank(name):
            continue
        schedule = make_schedule(name, num_stages, task.num_microbatches, task.num_ranks)
        if all(schedule.rank_of(s) == rank for s, rank in enumerate(task.placement)):
            yield schedule


def task_of(problem: Problem, choice: Choice, found: Estimate) -> Task:
    """Times of the estimate, and what memory the rest of each rank leaves for micro-batches."""
    schedule = choice.table()
    placement = tuple(map(schedule.rank_of, range(len(choice.stages))))
    memories = [model.memory for model in found.models]
    stages = tuple(
        replace(times, saved_bytes=memory.saved)
        for times, memory in zip(found.times, memories, strict=True)
    )
    task = Task(
        stages=stages,
        placement=placement,
        num_microbatches=choice.num_microbatches,
        halved_bytes=tuple(memory.halved for memory in memories),
        release_s=tuple(found.stepped.timeline.offsets),
    )
    rooms = []
    for rank, held_bytes in enumerate(peaks_bytes(task, schedule)):
        first = task.held[rank][0]
        room = problem.room_bytes(choice.stages[first].devices)
        rooms.append(held_bytes + _spare_bytes(found.prediction.stages[first].memory, room))
    return replace(task, capacity_bytes=tuple(rooms))


def _spare_bytes(memory: RankMemory, room: int) -> float:
    """What more micro-batches in flight may hold; less than nothing if it does not fit."""
    moving = memory.activations_bytes + memory.communication_bytes + memory.workspace_bytes
    slope = 1 + memory.fragmentation_bytes / max(1, moving)
    return (room - memory.used_bytes) / slope
