"""A stage that keeps all of some micro-batches, or makes it again ahead of the backward (K and R).

Where its backward then finds all that it needs, the stage is as one that recomputes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.simulate.compiled_schedule import HELD, LAST, B, F, I, K, R
from meshwright.costmodel.stage.merging import merged
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.costmodel.stage.program import Program, Step, run, talk
from meshwright.costmodel.stage.stage_model import StageModel, stage_model
from meshwright.costmodel.stage.sync import Sync
from meshwright.ir.plan.plan import Plan


def early_models(
    tables: CostTables, plan: Plan, models: Sequence[StageModel]
) -> tuple[StageModel, ...]:
    """The stages of the plan with what they do and hold where all is kept or made again early."""
    keeping = replace(
        plan, stages=tuple(replace(stage, recompute={}, saved={}) for stage in plan.stages)
    )
    found = []
    for index, model in enumerate(models):
        costs = stage_costs(tables, keeping, index)
        found.append(_with(model, stage_model(tables, keeping, index, costs)))
    return tuple(found)


def _with(model: StageModel, kept: StageModel) -> StageModel:
    programs = {K: kept.programs[F], R: Program(merged(tuple(_remake(model.sync, kept.sync))))}
    for last in (0, LAST):
        programs[B + HELD + last] = kept.programs[B + last]
    programs[I + HELD] = kept.programs[I]
    return replace(
        model,
        programs={**model.programs, **programs},
        memory=replace(model.memory, kept=kept.memory),
    )


def _remake(sync: Sync, kept: Sync) -> Iterator[Step]:
    """The forwards of the blocks that are not kept, in order."""
    yield run(sync.overheads.action_s, "overhead")
    for index, (own, plain) in enumerate(zip(sync.blocks, kept.blocks, strict=True)):
        if not own.again_s:
            continue
        yield from sync.remade(index)
        yield run(own.overhead_s, "overhead")
        yield run(own.again_s, "recompute")
        yield talk(max(0.0, own.tensor_backward_s - plain.tensor_backward_s), "tensor")
