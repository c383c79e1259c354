"""Where a plan draws other random numbers than one process would."""

from collections.abc import Iterator, Mapping

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import given, name_of
from meshwright.ir.layout.layout import Shard
from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.planner.inside.explain import strategy_of

_NAMED = 3
"""Places that a note names."""
_KEPT = "dropping ops"


def random_notes(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Dropout inside of attention whose heads are split, where kernels draw it by themselves, or of
    recurrent layers whose batch is split."""
    by_kernels = any(device.kind != "cpu" for device in cluster.device_types)
    split: dict[str, None] = {}
    batch: dict[str, None] = {}
    for index, stage in enumerate(plan.stages):
        axes = [axis for axis, size in stage.model if size > 1 and by_kernels]
        for block in plan.stage_blocks(graph, index):
            layout = plan.layout(stage.layouts[block.pattern])
            values, steps = _dropping(graph)[block.name]
            for op in values if axes else ():
                if over := [axis for axis in axes if _splits(op, layout, axis)]:
                    split[f"{_place(op)} over {', '.join(over)}"] = None
            if stage.dp > 1 or plan.num_microbatches > 1:
                batch |= dict.fromkeys(map(_place, steps))
    if split:
        yield (
            "dropout inside of attention that is split draws other masks than one process does: "
            + _listed(list(split))
        )
    if batch:
        yield (
            "dropout inside recurrent layers draws other masks when the batch is split: "
            + _listed(list(batch))
        )


def _dropping(graph: Graph) -> Mapping[str, tuple[list[Op], list[Op]]]:
    """Block -> its attention with dropout, and its layers that drop values within steps."""
    # Kept as cached properties are, with the graph: every plan that is tried asks.
    kept: dict[str, Mapping[str, tuple[list[Op], list[Op]]]] = graph.__dict__
    if _KEPT not in kept:
        kept[_KEPT] = {
            block.name: (list(filter(_drops_chances, ops)), list(filter(_drops_steps, ops)))
            for block in graph.blocks
            for ops in [graph.block_ops(block)]
        }
    return kept[_KEPT]


def _drops_chances(op: Op) -> bool:
    return name_of(op) == "scaled_dot_product_attention" and bool(given(op, "dropout_p"))


def _splits(op: Op, layout: BlockLayout, axis: str) -> bool:
    """Whether dropout is drawn for each part on the axis alone."""
    return any(isinstance(placed, Shard) for placed in strategy_of(op, layout, axis).outputs)


def _drops_steps(op: Op) -> bool:
    return (
        name_of(op) in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        and bool(given(op, "dropout"))
        and bool(given(op, "train"))
    )


def _place(op: Op) -> str:
    return op.source or op.module_path or op.key


def _listed(places: list[str]) -> str:
    more = len(places) - _NAMED
    return ", ".join(places[:_NAMED]) + (f" and {more} more" if more > 0 else "")
