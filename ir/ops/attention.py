"""Scaled dot-product attention: batch and heads may be split, queries where the mask allows, and
queries and keys together, which then go round."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.op_forms import numbered, only_axis, run_sizes, sharded, splitting, then
from meshwright.ir.graph.op_site import Form, OpSite, Value
from meshwright.ir.graph.ring_passes import RingPart
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    slot,
)
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import SHIFT, Inner, Operands, Passes
from meshwright.ir.random.chances import LEAST_WIDTH, MOST_WIDTH, room_bytes


def _rule(op: Op, graph: Graph) -> Rule:
    """q[..., h, l, e] k[..., g, s, e] v[..., g, s, f] (mask[..., l, s]) -> [..., h, l, f].

    With grouped queries h = g x r: each of the g key heads serves r query heads in a row. The mask
    has all keys even where they are split.
    """
    query, key = input_shapes(op, graph)[:2]
    batch = letters("b", len(query) - 3)
    heads: tuple[str, ...] = ()
    sizes = {"g": 1, "r": 1}
    if len(query) >= 3:
        sizes = {"g": key[-3], "r": query[-3] // key[-3]}
        heads = ("g",) * (sizes["g"] > 1) + ("r",) * (sizes["r"] > 1)
    grouped: Dims = (heads,) if len(query) >= 3 else ()
    own: Dims = (heads[:1] if sizes["g"] > 1 else (),) if len(query) >= 3 else ()
    inputs: list[Dims] = [
        (*batch, *grouped, ("l",), ("e",)),
        (*batch, *own, ("s",), ("e",)),
        (*batch, *own, ("s",), ("f",)),
    ]
    mask = slot(op, "attn_mask")
    if mask is not None:
        shape = input_shapes(op, graph)[mask]
        inputs.append(aligned((*batch, *grouped, ("l",), ("m",)), len(shape)))
    together = {} if given(op, "dropout_p") else {"ring": ("l", "s")}
    uneven = ("ring",) if given(op, "is_causal") else ()
    whole = {"s", "m", "e", "f"} | ({"l"} if given(op, "is_causal") else set())
    out = (*batch, *grouped, ("l",), ("f",))
    assert prod(sizes.values()) == (query[-3] if len(query) >= 3 else 1)
    return make_rule(
        op, graph, inputs, [out], sizes=sizes, whole=whole, together=together, uneven=uneven
    )


def _dropped(site: OpSite, form: Form) -> Form:
    """The numbers of its chances [..., h, l, s], and where samples lie."""
    if not form.arg("dropout_p"):
        return form
    layout, shape = site.output_layout(0), site.tensors[site.op.outputs[0]].shape
    found = numbered(site, (*shape[:-1], site.input(1).shape[-2]))
    batch = layout.get("dp")
    if isinstance(batch, Shard):
        if batch.dim or batch.outer != 1:
            raise PlanError(
                f"{site.op.key}: attention with dropout wants the batch in dim 0, not as {batch}"
            )
        section = site.split("dp", shape, layout).section
        found["rows"] = section // (site.axes["dp"].whole or section)
    return sharded(form, "attention", name=site.op.key, **found)


def _round(site: OpSite, form: Form) -> Form:
    dims = len(site.input(0).shape)
    axes = [a for a, s in site.strategies.items() if site.axes[a].size > 1 and _goes_round(s, dims)]
    if not axes:
        return form
    if form.target.startswith("sharded."):
        raise PlanError(
            f"{site.op.key}: attention with dropout {form.arg('dropout_p')} is split along keys, "
            "which has none; split heads or samples, or set it to 0"
        )
    both = [a for i in (0, 1) for a in splitting(site, i, dims - 2)]
    axis = only_axis(site, dims - 2, list(dict.fromkeys(both)))
    extra: dict[str, Value] = {"axis": axis}
    sections: list[int] = []
    kinds: set[bool] = set()
    for index, name in enumerate(("queries", "keys")):
        shard, size = site.input_layout(index)[axis], site.input(index).shape[-2]
        assert isinstance(shard, Shard)
        extra[name] = run_sizes(
            site, axis, size // shard.outer, replace(shard, outer=1, zigzag=False)
        )
        sections.append(shard.outer)
        kinds.add(shard.zigzag)
    if sections != [1, 1]:
        extra["sections"] = tuple(sections)
    if len(kinds) > 1:
        raise PlanError(
            f"{site.op.key}: queries are {site.input_layout(0)[axis]} on {axis} and keys "
            f"{site.input_layout(1)[axis]}; both are in zigzag or neither"
        )
    if True in kinds:
        extra["zigzag"] = True
    return replace(form.having(**extra), target="sharded.ring_attention")


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Scores and their product with the values; 5 per score for the softmax."""
    *batch, queries, width = of(args.get("query"))
    keys, value_width = of(args.get("key"))[-2], of(args.get("value"))[-1]
    scores = prod(batch) * queries * keys
    return 2 * scores * (width + value_width) + 5 * scores


def _goes_round(strategy: Strategy, dims: int) -> bool:
    """Whether attention on values of so many dims keeps its keys split along the sequence, as the
    queries are, and passes them round."""
    query, key = strategy.inputs[:2]
    return all(isinstance(p, Shard) and p.dim == dims - 2 for p in (query, key))


def _busiest(op: Op, strategy: Strategy, ranks: int, queries: Shape) -> float:
    """Where queries and keys lie in k sections, the last rank's queries see (k + 1 - 1/ranks) / 2k
    of the keys, and half of them in the mean; 0 where each rank has all queries."""
    if not given(op, "is_causal") or not _goes_round(strategy, len(queries)):
        return 0.0
    placed = strategy.inputs[0]
    assert isinstance(placed, Shard)
    return 1.0 if placed.zigzag else 1 + (1 - 1 / ranks) / placed.outer


def _kernel_keeps(shapes: Sequence[Shape]) -> int | None:
    """Where values are not as wide as keys (latent attention), torch's kernel of CPUs gives way to
    products, which keep all scores; those of GPUs keep a logarithm for each query, as it does
    elsewhere, and a mask as numbers (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:
    memory-efficient attention and cuDNN's take values of other widths)."""
    query, _, value, *mask = shapes
    if value[-1] == query[-1]:
        return None
    return 4 * prod(query[:-1]) + sum(2 * prod(shape) for shape in mask)


def _narrows(shapes: Sequence[Shape], found: int, width: int) -> int:
    """A mask as numbers, of a kernel that keeps a logarithm for each query beside it; products in
    its place keep all in float32 (`_scaled_dot_product_attention_math`)."""
    masks = width * sum([prod(shape) for shape in shapes[3:]])
    return masks if found == 4 * prod(shapes[0][:-1]) + masks else 0


def _own_bytes(
    op: Op, shapes: Sequence[Shape], width: int, kind: str
) -> tuple[int, int] | None:  # fmt: skip
    """Of whole scores, where it drops and no kernel of ours does."""
    query, _, value = shapes[:3]
    fits = len(query) == 4 and all([LEAST_WIDTH <= x[-1] <= MOST_WIDTH for x in (query, value)])
    by_kernel = kind != "cpu" and width <= 2 and fits
    return None if by_kernel or not given(op, "dropout_p") else room_bytes(shapes, width, kind)


def _scores_bytes(op: Op, part: CallPart) -> int:
    """Of all scores, where torch makes them as a value of its own: on CPUs for a mask with a
    gradient and for fewer key heads. It keeps them, which a trace has seen; 0 elsewhere."""
    query, key = part.shapes[:2]
    nbytes = prod(query[:-1]) * key[-2] * max(part.width, 4)
    made = part.device_kind == "cpu" and not given(op, "dropout_p")
    return nbytes if made and part.kept >= nbytes else 0


def _temporaries(op: Op, part: CallPart) -> int:
    """Two tables of gradients of scores."""
    scores = _scores_bytes(op, part)
    return max(0, 2 * scores - part.wanted_values() * part.width)


def _forward_inside(op: Op, part: CallPart) -> int:
    """Scores, what the mask makes of them, and operands scaled and laid out for products, with a
    head of keys and values for each of queries."""
    scores = _scores_bytes(op, part)
    query, key = part.shapes[:2]
    copies = 4 if query[:-2] != key[:-2] else 2
    return scores and 2 * scores + copies * prod(query) * max(part.width, 4)


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Ring attention: keys and values go round, and in backward their gradients after them, the
    last of which nothing is computed beside."""
    key, value = inputs[1:3]
    if not _goes_round(strategy, len(key.shape)):
        return ()
    length, placed = key.shape[-2], strategy.inputs[1]
    sections = placed.outer if isinstance(placed, Shard) else 1
    part = -(-length // (ranks * sections)) * sections
    nbytes = (key.nbytes + value.nbytes) // length * part
    item = key.nbytes // max(prod(key.shape), 1)
    gradients = nbytes * max(item, 4) // item
    found = (
        Inner(SHIFT, nbytes, ranks - 1, backward=False, beside=True),
        Inner(SHIFT, nbytes, ranks - 1, backward=True, beside=True),
        Inner(SHIFT, gradients, ranks - 2, backward=True, beside=True),
        Inner(SHIFT, gradients, 1, backward=True),
    )
    return tuple(message for message in found if message.times)


def _passes(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> Passes | None:
    """Of ring attention."""
    query, key, value = inputs[:3]
    placed = strategy.inputs[0]
    if not _goes_round(strategy, len(key.shape)) or not isinstance(placed, Shard):
        return None
    return RingPart(
        ranks=ranks,
        sections=placed.outer,
        zigzag=placed.zigzag,
        causal=bool(given(op, "is_causal")),
        item=key.nbytes // max(prod(key.shape), 1),
        queries=prod(query.shape) / ranks,
        keys=(prod(key.shape) + prod(value.shape)) / ranks,
        results=prod(outputs[0].shape) / ranks,
        rows=prod(outputs[0].shape[:-1]) / ranks,
        heads=prod(query.shape[:-2]) / max(prod(key.shape[:-2]), 1),
    ).passes


_ATTENTION = OpFacts(op_class=OpClass.ATTENTION)
FACTS = {
    **named(
        "scaled_dot_product_attention",
        replace(
            _ATTENTION,
            rule=_rule,
            flops=_flops,
            form=then(_dropped, _round),
            messages=_messages,
            passes=_passes,
            busiest=_busiest,
            kernel_keeps=_kernel_keeps,
            narrows=_narrows,
            own_bytes=_own_bytes,
            temporaries=_temporaries,
            forward_inside=_forward_inside,
        ),
    ),
    **named(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention",
        _ATTENTION,
    ),
}
