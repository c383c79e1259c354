"""Where a plan draws other random numbers than one process would."""

from collections.abc import Iterator, Mapping

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import given, name_of
from meshwright.ir.layout.layout import Shard
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage
from meshwright.planner.inside.explain import strategy_of

_NAMED = 3
"""Places that a note names."""
_KEPT = "dropping ops"


def random_notes(graph: Graph, plan: Plan) -> Iterator[str]:
    """Dropout that is split on model axes, or of recurrent layers whose batch is."""
    split: dict[str, None] = {}
    batch: dict[str, None] = {}
    for index, stage in enumerate(plan.stages):
        for block in plan.stage_blocks(graph, index):
            layout = plan.layout(stage.layouts[block.pattern])
            for op in _dropping(graph)[block.name]:
                if axes := _split_dropout(op, layout, stage):
                    split[f"{_place(op)} over {', '.join(axes)}"] = None
                if _drops_steps(op) and (stage.dp > 1 or plan.num_microbatches > 1):
                    batch[_place(op)] = None
    if split:
        yield (
            "dropout of values that are split draws other masks than one process does: "
            + _listed(list(split))
        )
    if batch:
        yield (
            "dropout inside recurrent layers draws other masks when the batch is split: "
            + _listed(list(batch))
        )


def _dropping(graph: Graph) -> Mapping[str, tuple[Op, ...]]:
    """Block -> its ops that may drop something, under any plan."""
    # Kept as cached properties are, with the graph: every plan that is tried asks.
    kept: dict[str, Mapping[str, tuple[Op, ...]]] = graph.__dict__
    if _KEPT not in kept:
        kept[_KEPT] = {
            block.name: tuple(
                [op for op in graph.block_ops(block) if _drops(op) or _drops_steps(op)]
            )
            for block in graph.blocks
        }
    return kept[_KEPT]


def _drops(op: Op) -> bool:
    name = name_of(op).removesuffix("_")
    plain = name in ("dropout", "meshwright.bias_gelu_dropout") and given(op, "p")
    fused = name == "scaled_dot_product_attention" and given(op, "dropout_p")
    return bool((plain and given(op, "train", True)) or fused)


def _split_dropout(op: Op, layout: BlockLayout, stage: Stage) -> tuple[str, ...]:
    """The axes on which dropout is drawn for each part alone."""
    if not _drops(op):
        return ()
    return tuple(
        axis
        for axis, size in stage.model
        if size > 1 and any(isinstance(p, Shard) for p in strategy_of(op, layout, axis).outputs)
    )


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
