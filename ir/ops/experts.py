"""A whole mixture of expert MLPs as one op: split tokens, experts, the inner dim of each, or tokens
and experts together, so that tokens travel."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd, prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.gates import parse_gate
from meshwright.ir.graph.expert_form import form_of, parse_form
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import Graph, Op, Ref
from meshwright.ir.graph.narrow_tokens import packed_bytes
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf, Split
from meshwright.ir.graph.op_forms import (
    index_of,
    own_part,
    run_sizes,
    sharded,
    splitting,
    then,
)
from meshwright.ir.graph.op_site import Form, OpSite, Value
from meshwright.ir.graph.routing import Routing, spread_evenly
from meshwright.ir.graph.rules import Dims, Rule, given, input_shapes, make_rule, slots
from meshwright.ir.graph.scaled_groups import fits
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.nesting import Splits, nesting_problem, outermost_first, splits_of
from meshwright.ir.layout.op_messages import Inner, Operands
from meshwright.ir.precision import Scaling


def _rule(op: Op, graph: Graph) -> Rule | None:
    """hidden[t, h] index[t, k] weights[t, k] gate_up[e, 2 i, h] down[e, h, i] -> [t, h], and what
    else there is: up[e, i, h], biases [e, 2 i] and [e, h]."""
    shapes = dict(zip(_names(op), input_shapes(op, graph), strict=True))
    if len(shapes["top_k_index"]) != 2:
        return None
    form = form_of(op)
    turned, apart = form.transposed_first, "up" in shapes
    inner = shapes["down"][1 if form.transposed_last else 2]
    columns = shapes["gate_up"][2 if turned else 1] * (1 + apart)
    sizes = {"two": columns // inner, "i": inner}
    both: tuple[str, ...] = ("i",)  # columns of the first product, and of its bias
    if columns > inner:
        both = ("i", "two") if form.interleaved else ("two", "i")
    own = ("i",) if apart else both
    known: dict[str, Dims] = {
        "hidden": (("t",), ("h",)),
        "top_k_index": (("t",), ("k",)),
        "top_k_weights": (("t",), ("k",)),
        "gate_up": (("e",), ("h",), own) if turned else (("e",), own, ("h",)),
        "down": (("e",), ("i",), ("h",)) if form.transposed_last else (("e",), ("h",), ("i",)),
        "up": (("e",), ("h",), own) if turned else (("e",), own, ("h",)),
        "gate_up_bias": (("e",), both),
        "down_bias": (("e",), ("h",)),
    }
    return make_rule(
        op, graph, [known[name] for name in shapes], [(("t",), ("h",))], sizes=sizes,
        whole={"two", "h", "k"}, plain="e", together={"route": ("t", "e")}, loose="t",
        nested={"route"}, added=slots(op, "down_bias"),
    )  # fmt: skip


def _names(op: Op) -> list[str]:
    """The arguments that are inputs, in order."""
    return [name for name, arg in op.args if isinstance(arg, Ref)]


def _own(site: OpSite, form: Form) -> Form:
    own = own_part(site, index_of(form, "gate_up"), 0)
    return sharded(form, "experts", start=own["start"]) if own else form


def _routed(site: OpSite, form: Form) -> Form:
    """Tokens may be split in any way: they only travel."""
    tokens, experts = splitting(site, 0, 0), splitting(site, 3, 0)
    if not set(tokens) & set(experts):
        return form
    if beside := [axis for axis in experts if axis not in tokens]:
        raise PlanError(
            f"{site.op.key}: tokens travel on {', '.join(set(tokens) & set(experts))}, but experts "
            f"are split on {', '.join(beside)}, too, where each rank has all tokens; split tokens "
            "there as well, or each expert within"
        )
    splits = _expert_splits(site)
    if problem := nesting_problem(site.input(3).shape[0], splits):
        raise PlanError(f"{site.op.key}: experts: {problem}")
    found = [_shares(site, axis) for axis, _, _ in outermost_first(splits)]
    (axis, shares), *inside = found
    extra: dict[str, Value] = {"axis": axis, "experts": shares}
    if inside:
        extra["inside"] = tuple(inside)
    return replace(
        form, args=(*site.arguments().items(), *extra.items()), target="sharded.routed_experts"
    )


def _expert_splits(site: OpSite) -> Splits:
    return splits_of(site.input_layout(3), {n: a for n, a in site.axes.items() if a.size > 1})[0]


def _shares(site: OpSite, axis: str) -> tuple[str, tuple[int, ...]]:
    """How many experts each rank of an axis has, of those of its place on the axes outside."""
    shard = site.input_layout(3)[axis]
    assert isinstance(shard, Shard)
    count = site.input(3).shape[0] // shard.outer
    return axis, run_sizes(site, axis, count, replace(shard, outer=1))


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Every token through those of its `k` experts that have weights, if all are equally likely:
    twice the values of an expert's matrices."""
    tokens, k = of(args.get("top_k_index"))
    weights = [of(args.get(name)) for name in ("gate_up", "down", "up")]
    count = max(1, weights[0][0])
    choices = count + parse_form(str(args.get("form") or "")).weightless
    return 2 * tokens * k * sum(prod(shape) for shape in weights if shape) // choices


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Tokens travel to the ranks of their experts and back, once to each rank; balanced routing.

    In backward the gradient of the result goes there, that of the tokens comes back.
    """
    hidden, index, weights = inputs[:3]
    if not (isinstance(strategy.inputs[0], Shard) and isinstance(strategy.inputs[3], Shard)):
        return ()
    if strategy.inputs[0].dim != 0 or strategy.inputs[3].dim != 0:
        return ()
    held, outer = max(1, inputs[3].shape[0] // ranks), strategy.inputs[3].outer
    routing = _routing(op, strategy, inputs)
    copies, crowd = routing.copies(outer * ranks), routing.crowd(outer * ranks)
    tokens, scales, indices = (ceil(o.nbytes * copies) for o in (hidden, weights, index))
    move = Primitive.ALL_TO_ALL
    home = Inner(
        move, tokens, 1, backward=False, routing=routing, held=held, outer=outer, crowd=crowd,
        leg="home",
    )  # fmt: skip
    out = replace(home, leg="out")
    if has_narrow_tokens(op):
        out = replace(out, nbytes=ceil(packed_bytes(*hidden.shape) * copies))
    return (
        Inner(move, 8 * ranks * ranks, 1, backward=False),  # the counts: ranks wait for them
        out,
        Inner(move, scales, 1, backward=False, crowd=crowd, leg="out"),
        Inner(move, indices, 1, backward=False, crowd=crowd, leg="out"),
        home,
        replace(out, backward=True),
        replace(home, backward=True),
        Inner(move, scales, 1, backward=True, crowd=crowd, leg="home"),
    )


def _routing(op: Op, strategy: Strategy, inputs: Operands) -> Routing:
    """What the graph says, or evenly spread over the experts that there are."""
    placed = strategy.inputs[3]
    outer = placed.outer if isinstance(placed, Shard) else 1
    if op.routing:
        return op.routing
    return spread_evenly(inputs[3].shape[0] * outer, inputs[1].shape[-1], form_of(op).weightless)


def _done(op: Op) -> float:
    """Of pairs with an expert if every choice is equally likely: how many were counted."""
    return op.routing.load(1) / op.routing.share if op.routing else 1.0


def _busiest(op: Op, strategy: Strategy, ranks: int, tokens: Shape) -> float:
    """Of an axis that splits experts, inside of the parts that others have cut them in: what its
    busiest rank computes, over the mean rank's."""
    placed = strategy.inputs[3]
    if op.routing is None or not isinstance(placed, Shard) or placed.dim != 0:
        return 0.0
    return op.routing.load(placed.outer * ranks) / op.routing.load(placed.outer)


def _parts(split: Split) -> int:
    """In how many runs experts lie."""
    placed = ((strategy.inputs[3], ranks) for strategy, ranks in split)
    return prod(ranks for place, ranks in placed if isinstance(place, Shard) and place.dim == 0)


def _kept(op: Op, shapes: Sequence[Shape], split: Split, busiest: float, kind: str) -> float:
    """Pairs without an expert here have no rows, but on a GPU that has all experts: nobody waits
    for it to say how many there are (`ir.graph.grouped`)."""
    if kind != "cpu" and _parts(split) == 1:
        return 1.0
    experts = shapes[3][0]
    return (busiest or 1.0) * experts / (experts + form_of(op).weightless)


def _copies(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> dict[int, int]:
    placed, routing = strategy.inputs[3], _routing(op, strategy, inputs)
    parts = ranks * (placed.outer if isinstance(placed, Shard) else 1)
    copies = routing.copies(parts) * routing.crowd(parts)
    return {i: ceil(inputs[i].nbytes * copies / ranks) for i in range(3)}


def _products(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """Gate and up in one product or two, then down, for each expert of this rank."""
    first, down, *up = (shape for shape in shapes if len(shape) == 3)
    width, count = shapes[0][-1], first[0]
    per_row = 2 * sum(prod(shape) for shape in (first, down, *up)) // max(1, count)
    if not count * per_row:
        return ()
    rows = max(1, round(flops / per_row / count))
    columns, inner = (prod(shape[1:]) // width for shape in (first, down))
    row = gcd(width, inner)
    into = Gemm(count, rows, columns, width, row)
    return (into,) * (1 + len(up)) + (Gemm(count, rows, width, inner, row),)


def has_narrow_experts(op: Op) -> bool:
    """Tell whether an op is a layer of experts with products of 8-bit floats."""
    return op.target == EXPERTS_TARGET and bool(form_of(op).scaling)


def has_narrow_tokens(op: Op) -> bool:
    """Tell whether tokens of a layer of experts travel in 8-bit floats."""
    return op.target == EXPERTS_TARGET and form_of(op).narrow_tokens


def scaling_on_rank(op: Op, shapes: Sequence[Shape]) -> Scaling:
    """What of experts' products has a scale of its own, where they are of 8-bit floats and kernels
    take the sizes that a rank has; empty for other operators."""
    if op.target != EXPERTS_TARGET:
        return ""
    form = form_of(op)
    hidden, *more = shapes[0][-1], *(shape for shape in shapes if len(shape) == 3)
    row = max(1, shapes[3][0] * hidden)
    widths = tuple(prod(shape) // row for shape in more)
    return form.scaling if all(widths) and fits((hidden, *widths)) else ""


def _casts_inside(
    hidden: int, columns: float, inner: float, experts: int, pairs: float, width: int, kind: str,
    busiest: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Bytes of operands in 8 bits for the gradient of the gate, of tokens and of weights: all rows
    and matrices at once for a kernel; in loops those of one expert, the one with `busiest` times
    the mean's rows, widened, with their product. Gradients of weights count apart, all of them, but
    that of the last is not there while the first is made."""
    matrix = experts * hidden
    last = width * matrix * inner
    if kind != "cpu":
        rows = pairs * hidden
        weights = rows + max(pairs * columns - last, pairs * inner)
        return rows + matrix * inner, pairs * columns + matrix * columns, weights
    rows, wide = busiest * pairs / max(1, experts), max(width, 4)

    def loop(n: float, made: float) -> float:
        return wide * (rows * hidden + rows * n + hidden * n) + width * made

    weights = max(loop(columns, hidden * columns) - last, loop(inner, hidden * inner))
    return loop(inner, rows * inner), loop(columns, rows * hidden), weights


def _busiest_expert(op: Op, held: int) -> float:
    """The pairs of the expert that has most, over the mean one's of the rank that has most."""
    known = op.routing
    return known.load(known.experts) / known.load(known.experts / max(1, held)) if known else 1.0


_INDEX_BYTES = 8
"""Of a pair: its token if it has a row; its place and its expert, whole numbers, if it has none."""


def _backward_inside(
    op: Op, shapes: Sequence[Shape], kept: int, width: int, kind: str, some: bool,
    wider: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """The most of four moments of a backward (`ir.graph.experts`), and a fifth, in widths of a
    pair's values: biases looked up, the gate's derivative, gradients of tokens as they are made and
    as they are summed; then gradients of weights."""
    tokens = shapes[0][0]
    first, last, *more = (prod(shape) for shape in shapes if len(shape) == 3)
    hidden, form = shapes[0][-1], form_of(op)
    row = max(1, shapes[3][0] * hidden)
    columns, inner = (first + sum(more)) / row, last / row
    if not columns:
        return 0, 0
    pairs = max(1.0, kept / columns / width)
    biased = [name for name in _names(op) if name.endswith("bias")]
    gate = parse_gate(str(given(op, "act", "")))
    beside = gate.at_once(2 if columns > inner else 1, width)
    rows = hidden + 1  # gradients of results, routing weights
    made = rows + columns + inner + hidden
    wide = 4 / width if width < 4 else 0  # sums of narrow rows are made of wide ones
    per_pair = tokens / max(1, pairs)
    if kind == "cpu":  # the sum of wide tokens is their gradient
        summed = made + wide * hidden * (1 + per_pair * (not wider))
    else:
        summed = made + 2 * hidden * (not some)  # masked, and put into order
    casts = (0.0, 0.0, 0.0)
    if scaling_on_rank(op, shapes):
        busiest = _busiest_expert(op, shapes[3][0])
        found = _casts_inside(hidden, columns, inner, shapes[3][0], pairs, width, kind, busiest)
        casts = found[0] / pairs / width, found[1] / pairs / width, found[2] / pairs / width
    elif wider:  # weights are cast for a product, and their gradients back when all are made
        weights = shapes[3][0] * hidden / pairs
        casts = weights * inner, weights * columns, weights * (columns + inner)
    before = (
        rows + 2 * inner + max(2 * hidden * ("down_bias" in biased), casts[0] - inner),
        rows + columns + (2 + beside) * inner,
        made + max(hidden * max(len(more), 2 * form.scaled_input), casts[1]),
    )
    # The gradient of tokens counts as there.
    to_come = per_pair * hidden * (wide if wider else 1.0)
    early = max(max(before) - to_come, summed)
    late = made + max(wide * max(columns, hidden) * bool(biased), casts[2])
    index = _INDEX_BYTES * (pairs + 2 * shapes[1][0] * shapes[1][1])
    return round(pairs * width * early + index), round(pairs * width * late + index)


FACTS = {
    "meshwright.experts": OpFacts(
        op_class=OpClass.MATMUL,
        rule=_rule,
        autocast="inside",
        flops=_flops,
        products=_products,
        form=then(_own, _routed),
        messages=_messages,
        copies=_copies,
        done=_done,
        busiest=_busiest,
        kept=_kept,
        narrows=lambda shapes, found, width: found,
        backward_inside=_backward_inside,
    )
}
