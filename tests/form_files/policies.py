"""Policies of retention as files of a user's own."""

from meshwright.costmodel.block.keeping import Makers
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.retention import fate_of, retention
from meshwright.ir.graph.graph import Block
from meshwright.planner.inside.saved_choice import SavedChoice
from meshwright.planner.problem.problem import Problem


def policy(problem: Problem, block: Block, name: str) -> dict[str, str]:
    """What a form says of the ops of a block, as if that took ten times as long: on so small
    tensors every op takes a launch, and nothing is cheap."""
    form, found = retention(name), _makers(problem, block)
    if form.choose is None:
        return {"*": fate_of(name)}
    keys = form.choose(SavedChoice(found), 10 * found.walk.clock.forward_s)
    return dict.fromkeys(keys, fate_of(name))


def _makers(problem: Problem, block: Block) -> Makers:
    layout = next(x for x in problem.layouts(()) if x.pattern == block.pattern)
    device = problem.tables.device_names[0]
    return problem.tables.blocks.makers(block, layout, BlockSpot(4, 1, (), device, (), ()))
