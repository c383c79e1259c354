"""Which gradients are sums of what the ranks of a model axis have."""

from collections.abc import Iterator, Mapping

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.layout.layout import RP, Shard, parse_placement, parse_strategy
from meshwright.ir.plan.plan import BlockLayout, Plan, param_key

Sums = Mapping[str, frozenset[str]]
"""Path of a parameter -> model axes on which it lies whole and its gradient is a sum."""


def summands(graph: Graph, block: Block, layout: BlockLayout | None) -> list[tuple[str, str]]:
    """Returns (tensor of a parameter, model axis) where a use of it in the block gives each rank a
    summand of its gradient."""
    if layout is None:
        return []
    params = {name for name in block.params if graph.tensors[name].requires_grad}
    found = []
    for op in graph.block_ops(block):
        for axis, text in layout.ops.get(op.key, {}).items():
            if axis == "dp":
                continue
            for name, placement in zip(op.inputs, parse_strategy(text).inputs, strict=True):
                if name in params and placement == RP:
                    found.append((name, axis))
    return found


def summed_axes(plan: Plan, graph: Graph, index: int) -> Sums:
    """Returns the model axes over which the gradients of a stage's parameters are sums: those of
    any use of it in the stage, on which no use splits it."""
    stage = plan.stages[index]
    if not stage.model:
        return {}
    found: dict[str, set[str]] = {}
    split: set[tuple[str, str]] = set()
    known: dict[str, tuple[list[tuple[int, str]], list[tuple[int, str]]]] = {}
    for block in plan.stage_blocks(graph, index):
        if block.pattern not in stage.layouts:
            continue
        if block.pattern not in known:
            layout = plan.layout(stage.layouts[block.pattern])
            known[block.pattern] = (
                [(block.params.index(n), a) for n, a in summands(graph, block, layout)],
                list(_splits(graph, block, layout)),
            )
        paths = [graph.tensors[name].fqn for name in block.params]
        summed, cut = known[block.pattern]
        for at, axis in summed:
            found.setdefault(paths[at], set()).add(axis)
        split |= {(paths[at], axis) for at, axis in cut}
    return {
        path: frozenset(axis for axis in axes if (path, axis) not in split)
        for path, axes in found.items()
    }


def _splits(graph: Graph, block: Block, layout: BlockLayout) -> Iterator[tuple[int, str]]:
    """(place of a parameter, axis that cuts it)."""
    for at, name in enumerate(block.params):
        path = graph.tensors[name].fqn
        for axis, text in layout.parameters.get(param_key(block, path), {}).items():
            if isinstance(parse_placement(text), Shard):
                yield at, axis
