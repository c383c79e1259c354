"""Where a plan draws other random numbers than one process would."""

from collections.abc import Iterator, Mapping

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import given, name_of
from meshwright.ir.plan.plan import Plan

_NAMED = 3
"""Places that a note names."""
_KEPT = "dropping ops"


def random_notes(graph: Graph, plan: Plan) -> Iterator[str]:
    """Dropout inside of recurrent layers whose batch is split."""
    batch: dict[str, None] = {}
    for index, stage in enumerate(plan.stages):
        if stage.dp == 1 and plan.num_microbatches == 1:
            continue
        for block in plan.stage_blocks(graph, index):
            batch |= dict.fromkeys(map(_place, _dropping(graph)[block.name]))
    if batch:
        yield (
            "dropout inside recurrent layers draws other masks when the batch is split: "
            + _listed(list(batch))
        )


def _dropping(graph: Graph) -> Mapping[str, list[Op]]:
    """Block -> its layers that drop values within steps."""
    # Kept as cached properties are, with the graph: every plan that is tried asks.
    kept: dict[str, Mapping[str, list[Op]]] = graph.__dict__
    if _KEPT not in kept:
        kept[_KEPT] = {
            block.name: list(filter(_drops_steps, graph.block_ops(block))) for block in graph.blocks
        }
    return kept[_KEPT]


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
