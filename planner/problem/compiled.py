"""What a profile knows of blocks as torch.compile makes them."""

from dataclasses import replace

from meshwright.costmodel.stage.placement import spots
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.problem import Problem


def measured_compiled(problem: Problem, plan: Plan) -> bool:
    """Whether all blocks of the plan were measured compiled, with these or other numbers of
    samples."""
    tables, named = problem.tables, {layout.name: layout for layout in plan.layouts}
    if tables.profile is None:
        return False
    for index, stage in enumerate(plan.stages):
        blocks = plan.stage_blocks(problem.graph, index)
        for spot in spots(tables, replace(stage, compile=True)):
            for block in blocks:
                layout = named[stage.layouts[block.pattern]]
                if not tables.blocks.is_measured(block, layout, spot):
                    return False
    return True
