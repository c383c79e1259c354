"""Plans for look-ups of bags that lie where the batch says, which are cut by samples alone."""

from collections.abc import Iterator

from meshwright.ir.graph.bags import is_cut, looks_up_given
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.layout.layout import R, Shard, parse_strategy
from meshwright.ir.plan.plan import Plan

_SAYS = "{}: its bags lie where offsets say"


def bag_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yields the look-ups whose bags a plan would cut in the wrong places: into micro-batches,
    where something else reads their ids or offsets, or makes them; or not as samples are."""
    for op in _of_samples(graph):
        says = _SAYS.format(op.key)
        if is_cut(op, graph) and any(_is_torn(graph, plan, i, op) for i in range(len(plan.stages))):
            yield f"{says}, and a layout cuts them otherwise; nearest: S(0) on dp alone"
    yield from uncut_bags(graph, plan.num_microbatches)


def uncut_bags(graph: Graph, num_microbatches: int) -> Iterator[str]:
    """Yields the look-ups whose bags so many micro-batches cannot cut, and what is nearest."""
    for op in _of_samples(graph):
        if num_microbatches > 1 and not is_cut(op, graph):
            yield (
                f"{_SAYS.format(op.key)} that other ops read or make, too, which "
                f"{num_microbatches} micro-batches cannot cut; nearest: num_microbatches 1, or "
                "inputs for bags alone, ids [ids of all samples] and offsets [samples], or ids "
                "[samples, ids of each] without offsets, filled up with padding_idx"
            )


def _of_samples(graph: Graph) -> Iterator[Op]:
    for op in graph.ops:
        if looks_up_given(op, graph) and _is_of_samples(op, graph):
            yield op


def _is_of_samples(op: Op, graph: Graph) -> bool:
    kinds = {graph.tensors[name].kind for name in op.inputs[1:]}
    constant = kinds <= {Kind.BUFFER, Kind.CONSTANT}
    return graph.tensors[op.outputs[0]].shape[0] == graph.batch_size and not constant


def _is_torn(graph: Graph, plan: Plan, index: int, op: Op) -> bool:
    """Whether ranks of a stage share the samples of a look-up otherwise than they are cut."""
    stage = plan.stages[index]
    if stage.dp == 1 and plan.num_microbatches == 1:
        return False
    for block in plan.stage_blocks(graph, index):
        if op in graph.block_ops(block):
            name = stage.layouts.get(block.pattern)
            said = {} if name is None else plan.layout(name).ops.get(op.key, {})
            ids = {axis: parse_strategy(text).inputs[1] for axis, text in said.items()}
            return not isinstance(ids.pop("dp", R), Shard) or any(x != R for x in ids.values())
    return False
