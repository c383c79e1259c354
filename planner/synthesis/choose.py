"""A schedule made for the stages of a plan, where that is worth while."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.costmodel.cores import step_cores
from meshwright.costmodel.estimate import Estimate, estimate_all
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.plan import Plan, ScheduleTable
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.plan.schedule import Schedule, halves_backwards, says_when_to_recompute
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.predict import excess_bytes, settled
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import (
    MADE,
    SCHEDULES,
    fits,
    make_schedule,
    recomputes_early,
    stages_per_rank,
    traits,
)
from meshwright.planner.synthesis.bound import bound_s
from meshwright.planner.synthesis.solve import synthesise
from meshwright.planner.synthesis.task import Task, peaks_bytes

WORTH = 0.02
"""Plans that cannot gain so much keep their schedule."""
MOST = 4000
"""Actions up to which a schedule is made: what is lost at the ends of longer ones is little."""
TRIES = 3
"""Memory of a task is linear in what is in flight, that of a plan nearly: tries until it fits."""


def possible_s(problem: Problem, plan: Plan) -> float:
    """What the plan's step might come down to with a schedule made for it; infinite if none can be
    made, or pins rule it out."""
    actions = 3 * len(plan.stages) * plan.num_microbatches
    if len(plan.schedule.rows) == 1 or plan.num_microbatches == 1 or actions > MOST:
        return float("inf")
    if says_when_to_recompute(problem.tables.schedule(plan.schedule)):
        return float("inf")
    if not allowed(problem.constraints, "schedule", (MADE,)):
        return float("inf")
    assert plan.predicted
    found = estimate_all(problem.graph, problem.cluster, plan, problem.tables)
    try:
        least_s = max(bound_s(task_of(problem, plan, found)), _shared_s(problem, plan, found))
    except Infeasible:
        return float("inf")
    return plan.predicted.step_s - (found.stepped.timeline.step_s - least_s)


def synthesised(
    problem: Problem, plan: Plan, *, below_s: float = float("inf"), effort: float = 0.5
) -> Plan | None:
    """The plan with a schedule made for it, if that takes less than `below_s` and than its own.

    None if no schedule can be worth while, none was found, or pins rule it out.
    """
    assert plan.predicted
    if not excess_bytes(problem, plan):
        below_s = min(below_s, plan.predicted.step_s)
    possible = possible_s(problem, plan)
    if possible == float("inf") or possible > below_s * (1 - WORTH):
        return None
    found = estimate_all(problem.graph, problem.cluster, plan, problem.tables)
    made = _that_fits(problem, plan, task_of(problem, plan, found), effort)
    return made if made and made.predicted and made.predicted.step_s < below_s else None


def asked_for(problem: Problem, plan: Plan, effort: float = 0.5) -> Plan | None:
    """The plan with a schedule made for it, whether or not that is quicker; None if none fits."""
    if len(plan.schedule.rows) == 1:
        return None
    found = estimate_all(problem.graph, problem.cluster, plan, problem.tables)
    return _that_fits(problem, plan, task_of(problem, plan, found), effort)


def _shared_s(problem: Problem, plan: Plan, found: Estimate) -> float:
    """No order of actions is shorter than their work on the cores that processes share."""
    work = sum((t.forward_s + t.backward_s) * t.processes for t in found.times)
    return plan.num_microbatches * work / step_cores(problem.cluster)


def _that_fits(problem: Problem, plan: Plan, task: Task, effort: float) -> Plan | None:
    for _ in range(TRIES):
        try:
            schedule = synthesise(task, files(task), effort=effort).schedule
        except Infeasible:
            return None
        made = with_schedule(problem, plan, schedule)
        excess = excess_bytes(problem, made)
        if not excess:
            return made
        task = replace(task, capacity_bytes=tuple(room - excess for room in task.capacity))
    return None


def with_schedule(problem: Problem, plan: Plan, schedule: Schedule) -> Plan:
    """The plan under another schedule, predicted anew."""
    table = ScheduleTable(name=MADE, rows=tuple(str(schedule).splitlines()))
    asked = tuple(map(str, problem.constraints))
    plan = replace(plan, schedule=table, constraints=asked)
    if halves_backwards(schedule):  # then nothing of a backward can be beside another
        stages = tuple(replace(stage, overlap="none") for stage in plan.stages)
        plan = replace(plan, stages=stages)
    return settled(problem, plan)


def files(task: Task) -> Iterator[Schedule]:
    """The schedules of files with the task's placement of stages."""
    num_stages = len(task.stages)
    chunks = num_stages // task.num_ranks
    for name in SCHEDULES:
        if num_stages % task.num_ranks or chunks not in stages_per_rank(name):
            continue
        if (
            recomputes_early(name)
            or traits(name).pairs
            or not fits(name, num_stages, task.num_microbatches, task.num_ranks)
        ):
            continue
        schedule = make_schedule(name, num_stages, task.num_microbatches, task.num_ranks)
        if all(schedule.rank_of(s) == rank for s, rank in enumerate(task.placement)):
            yield schedule


def task_of(problem: Problem, plan: Plan, found: Estimate) -> Task:
    """Times of the estimate, and what memory the rest of each rank leaves for micro-batches."""
    table = found.stepped.timeline.table
    memories = [model.memory for model in found.models]
    stages = tuple(
        replace(times, saved_bytes=memory.saved + memory.sent)
        for times, memory in zip(found.times, memories, strict=True)
    )
    task = Task(
        stages=stages,
        placement=table.owners,
        num_microbatches=plan.num_microbatches,
        # A schedule has room for what is there before the halves, if they leave less.
        halved_bytes=tuple(max(0, memory.halved) for memory in memories),
        release_s=tuple(found.stepped.timeline.offsets),
    )
    rooms = []
    for rank, held_bytes in enumerate(peaks_bytes(task, table.schedule)):
        first = task.held[rank][0]
        room = problem.room_bytes(plan.stages[first].devices)
        rooms.append(held_bytes + _spare_bytes(found.prediction.stages[first].memory, room))
    return replace(task, capacity_bytes=tuple(rooms))


def _spare_bytes(memory: RankMemory, room: int) -> float:
    """What more micro-batches in flight may hold; less than nothing if it does not fit."""
    moving = memory.activations_bytes + memory.communication_bytes + memory.workspace_bytes
    slope = 1 + memory.fragmentation_bytes / max(1, moving)
    return (room - memory.used_bytes) / slope
