"""Plans whose attention is split along the sequence, whatever a search would choose: keys and
values go round a ring."""

from dataclasses import replace

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.plan.plan import BlockLayout, Plan

AXIS = "cp"


def with_rings(plan: Plan, graph: Graph) -> Plan:
    """The plan with each attention of the graph on a ring along the axis `cp`."""
    placed = {op.key: _ring(graph, op) for op in graph.ops if "scaled_dot_product" in op.target}

    def changed(layout: BlockLayout) -> BlockLayout:
        rings = {
            key: {**given, AXIS: placed[key]} for key, given in layout.ops.items() if key in placed
        }
        return replace(layout, ops={**layout.ops, **rings})

    return replace(plan, layouts=tuple(changed(one) for one in plan.layouts))


def _ring(graph: Graph, op: Op) -> str:
    """Queries, keys and values in runs, and the mask's rows with the queries that have them."""
    along = [f"S({len(graph.tensors[name].shape) - 2})" for name in op.inputs[:3]]
    masks = [graph.tensors[name].shape for name in op.inputs[3:]]
    masked = [f"S({len(shape) - 2})" if shape[-2] > 1 else "R|P" for shape in masks]
    return f"{' '.join(along + masked)} -> {along[0]}"
