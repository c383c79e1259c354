"""Pipelines whose forwards and backwards run together (`dual_pipe_v_pairs`): of a plan that waits
for collectives inside its blocks, with all blocks cut anew into two stages of a V on each rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.costmodel.stage.placement import stage_costs
from meshwright.ir.graph.graph import Block
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.verify import verify
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.candidates import even_cuts
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import (
    SCHEDULES,
    fits,
    make_schedule,
    plan_table,
    stages_per_rank,
    traits,
)
from meshwright.planner.search.finish import changed

_PARTS = (1, 2, 4, 0.5)
"""Of a plan's micro-batches, how many are tried: the schedule that it has may like others best."""
_LEAST = 0.02
"""Of a step that collectives inside blocks take: with less there is too little to gain."""


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan under each schedule with pairs, also with other samples in a micro-batch."""
    ranks = len(plan.schedule.rows)
    if ranks == 1 or not _is_waiting(plan) or not _are_alike(plan):
        return
    if problem.tables.run_as.blocking_sends:
        return
    for name in allowed(problem.constraints, "schedule", SCHEDULES):
        if not traits(name).pairs or name == plan.schedule.name:
            continue
        per_rank = stages_per_rank(name)[0]
        if ranks * per_rank > len(problem.graph.blocks):
            continue
        counts = [round(part * plan.num_microbatches) for part in _PARTS]
        for count in allowed(problem.constraints, "num_microbatches", counts):
            if not count or not fits(name, ranks * per_rank, count, ranks):
                continue
            made = make_schedule(name, ranks * per_rank, count, ranks)
            owners = [made.rank_of(index) for index in range(made.num_stages)]
            found = replace(
                plan, stages=_cut_anew(problem, plan, owners, count), num_microbatches=count,
                schedule=plan_table(name, made), predicted=None,
            )  # fmt: skip
            if not any(finding.severity == "error" for finding in verify(found)):
                yield changed(problem, found)


def _is_waiting(plan: Plan) -> bool:
    predicted = plan.predicted
    if predicted is None or predicted.breakdown is None:
        return False
    if all(stage.model_size == 1 for stage in plan.stages):
        return False
    # What overlap hides inside a micro-batch is there to be hidden by another one instead.
    overlaps = any(stage.overlap != "none" for stage in plan.stages)
    return overlaps or predicted.breakdown.tensor_s > _LEAST * predicted.step_s


def _are_alike(plan: Plan) -> bool:
    """Whether any stage may have any blocks: stages differ in blocks and devices only."""
    first, *others = (
        replace(
            s, first="", last="", devices=(), overlap="none", layouts={}, recompute={}, saved={}
        )
        for s in plan.stages
    )
    return all(other == first for other in others) and not any(s.by_parameter for s in plan.stages)


def _names(blocks: Sequence[Block]) -> set[str]:
    return {name for block in blocks for name in (block.name, block.pattern)}


def _cut_anew(problem: Problem, plan: Plan, owners: list[int], count: int) -> tuple[Stage, ...]:
    """As many stages, of about equal work, for so many micro-batches; what stages say of patterns
    is said of all."""
    blocks, work = problem.graph.blocks, list[float]()
    for index in range(len(plan.stages)):
        costs = stage_costs(problem.tables, plan, index)
        work += [cost.forward_s + cost.backward_s for cost in costs.cost.blocks]
    devices = {}
    for index, stage in enumerate(plan.stages):
        devices[plan.schedule.parse().rank_of(index)] = stage.devices
    layouts = {key: name for stage in plan.stages for key, name in stage.layouts.items()}
    recompute = {key: mode for stage in plan.stages for key, mode in stage.recompute.items()}
    saved = {key: kept for stage in plan.stages for key, kept in stage.saved.items()}
    usual = plan.stages[0].batch_shares
    shares = tuple([share * plan.num_microbatches // count for share in usual])
    cuts = (0, *even_cuts(work, len(owners)), len(blocks))
    found = []
    for (start, stop), rank in zip(pairwise(cuts), owners, strict=True):
        own = blocks[start:stop]
        known = _names(own) | (layouts.keys() - _names(blocks))  # the prelude's, too
        found.append(
            replace(
                plan.stages[0], first=own[0].name, last=own[-1].name, devices=devices[rank],
                batch_shares=shares,
                overlap="none",
                layouts={key: name for key, name in layouts.items() if key in known},
                recompute={key: mode for key, mode in recompute.items() if key in known},
                saved={key: kept for key, kept in saved.items() if key in known},
            )
        )  # fmt: skip
    return tuple(found)
