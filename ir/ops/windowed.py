"""Attention over a window: batch and heads may be split, and the sequence, where ranks fetch the
keys that reach over the border of a part. Without a window, as with sinks alone, it stays whole."""

from collections import Counter
from functools import lru_cache
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf
from meshwright.ir.graph.op_forms import only_axis, run_sizes, splitting
from meshwright.ir.graph.op_site import Form, OpSite, Value
from meshwright.ir.graph.rules import Dims, Rule, given, input_shapes, letters, make_rule
from meshwright.ir.graph.windowed import seen_blocks
from meshwright.ir.layout.layout import Shard, Strategy, balanced, units_of
from meshwright.ir.layout.op_messages import SHIFT, Inner, Operands


def _window(op: Op) -> int:
    window = given(op, "window")
    assert isinstance(window, int)
    return window


def _rule(op: Op, graph: Graph) -> Rule:
    """q[..., h, l, e] k[..., g, s, e] v[..., g, s, f] (sinks[h]) -> [..., h, l, f], h = g x r."""
    query, key = input_shapes(op, graph)[:2]
    batch = letters("b", len(query) - 3)
    sizes = {"g": key[-3], "r": query[-3] // key[-3]}
    heads = tuple(f for f in ("g", "r") if sizes[f] > 1)
    own: Dims = (heads[:1] if sizes["g"] > 1 else (),)
    inputs: list[Dims] = [
        (*batch, heads, ("l",), ("e",)), (*batch, *own, ("s",), ("e",)),
        (*batch, *own, ("s",), ("f",)),
    ]  # fmt: skip
    inputs += [(heads,)] * (len(op.inputs) - 3)
    together = {"window": ("l", "s")} if _window(op) else {}
    return make_rule(
        op, graph, inputs, [(*batch, heads, ("l",), ("f",))], sizes=sizes, whole="lsef",
        together=together,
    )  # fmt: skip


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Scores of the blocks, or half of all without a window, and their product with the values; 5
    per score for the softmax."""
    *batch, queries, width = of(args["query"])
    window = args["window"]
    assert isinstance(window, int)
    seen = seen_blocks(queries, window) if window else ()
    scores = sum((r.stop - r.start) * (c.stop - c.start) for r, c in seen)
    scores = scores if window else queries * (queries + 1) // 2
    return prod(batch) * scores * (2 * (width + of(args["value"])[-1]) + 5)


def _is_split(strategy: Strategy, dims: int) -> bool:
    placed = strategy.inputs[0]
    return isinstance(placed, Shard) and placed.dim == dims - 2


def _form(site: OpSite, form: Form) -> Form:
    """A rank with part of the sequence fetches keys; one with all of it calls the operator."""
    dims = len(site.input(0).shape)
    split = list(dict.fromkeys(a for i in (0, 1) for a in splitting(site, i, dims - 2)))
    if not split:
        return form
    axis = only_axis(site, dims - 2, split)
    placed = [site.input_layout(i)[axis] for i in range(3)]
    shard, size = placed[0], site.input(0).shape[-2]
    if not isinstance(shard, Shard) or len(set(placed)) > 1:
        raise PlanError(
            f"{site.op.key}: queries, keys and values are {', '.join(map(str, placed))} on {axis}; "
            f"a window needs all three split alike, as {shard}"
        )
    sizes = run_sizes(site, axis, size // shard.outer, Shard(shard.dim, 1, shard.inner))
    extra: dict[str, Value] = {"axis": axis, "sizes": sizes}
    if shard.outer > 1:
        extra["sections"] = shard.outer
    if shard.zigzag:
        extra["zigzag"] = True
    return Form("sharded.windowed_attention", form.having(**extra).args)


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Keys and values before each run of a rank come from others; their gradients go home."""
    key, value = inputs[1:3]
    placed = strategy.inputs[0]
    if not _is_split(strategy, len(inputs[0].shape)):
        return ()
    assert isinstance(placed, Shard)
    row = (key.nbytes + value.nbytes) // key.shape[-2]
    rows = _fetched(key.shape[-2], placed, ranks, _window(op))
    return tuple(Inner(SHIFT, row * n, 1, b) for n, b in zip(rows, (False, True), strict=True) if n)


@lru_cache(maxsize=1024)
def _fetched(length: int, placed: Shard, ranks: int, window: int) -> tuple[int, int]:
    """Rows that the busiest rank hands out, and those that the busiest one gets."""
    sizes = [placed.inner * units for units in balanced(units_of(length, placed), ranks)]
    order = [*range(ranks)]
    turns = (order[::-1] if placed.zigzag and i % 2 else order for i in range(placed.outer))
    owners = [rank for turn in turns for rank in turn]
    given, got = Counter[int](), Counter[int]()
    for at, taker in enumerate(owners):
        left = window - 1
        for giver in (owners[i] for i in range(at - 1, -1, -1)):
            if left <= 0:
                break
            rows = min(left, sizes[giver])
            left -= rows
            if giver != taker:
                given[giver] += rows
                got[taker] += rows
    return max(given.values(), default=0), max(got.values(), default=0)


FACTS = {
    "meshwright.windowed_attention": OpFacts(
        op_class=OpClass.ATTENTION, rule=_rule, flops=_flops, form=_form, messages=_messages
    )
}
