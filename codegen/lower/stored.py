"""How the parameters of a stage are stored: split over model axes, whole on the data axis."""

from meshwright.codegen.lower.stage_context import Where, parsed
from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.graph.param import Param
from meshwright.ir.layout.layout import RP, Layout, R, Replicate, Shard
from meshwright.ir.layout.nesting import tensor_runs
from meshwright.ir.plan.plan import BlockLayout, Plan, param_key
from meshwright.ir.plan.summed import summands


def stored_layouts(at: Where) -> dict[str, Layout]:
    """How each param of the stage is stored, with what its gradient will be.

    Whole on a model axis, its gradient is a summand there if that of any use is.
    """
    found: dict[str, Layout] = {}
    for block in at.blocks:
        layout = at.layout(block.pattern)
        for name in block.params:
            placed = found.setdefault(name, {})
            placed |= declared(at.graph, block, layout, name)
            placed["dp"] = RP if at.graph.tensors[name].requires_grad else R
    for block in at.blocks:
        for name, axis in summands(at.graph, block, at.layout(block.pattern)):
            if found[name].get(axis, R) == R:
                found[name][axis] = RP
    return found


def declared(graph: Graph, block: Block, layout: BlockLayout | None, name: str) -> Layout:
    """The model axes that a block's layout splits a param over."""
    tensor = graph.tensors[name]
    if layout is None or not tensor.fqn:
        return {}
    placed = parsed(layout.parameters.get(param_key(block, tensor.fqn), {}))
    return {axis: p for axis, p in placed.items() if axis != "dp" and isinstance(p, Shard)}


def stored_splits(graph: Graph, plan: Plan, stage: int, name: str) -> Layout:
    """The model axes that a stage splits a param over, all its blocks considered."""
    found: Layout = {}
    for block in plan.stage_blocks(graph, stage):
        if name in block.params and block.pattern in plan.stages[stage].layouts:
            layout = plan.layout(plan.stages[stage].layouts[block.pattern])
            found |= declared(graph, block, layout, name)
    return found


def param_of(at: Where, name: str, layout: Layout) -> Param:
    """What the runtime must know of a param."""
    tensor = at.graph.tensors[name]
    split: Layout = {axis: p for axis, p in layout.items() if isinstance(p, Shard)}
    partial = (axis for axis, p in layout.items() if isinstance(p, Replicate) and p.partial_grad)
    return Param(
        name=name,
        fqn=tensor.fqn,
        kind=Kind(tensor.kind),
        global_shape=tensor.shape,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        split_on=tuple(axis for axis in at.axes if axis in split),
        runs=tensor_runs(tensor.shape, split, at.axes, at.coordinates),
        sum_over=tuple(axis for axis in partial if axis != "dp"),
    )
