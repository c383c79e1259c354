"""Scaled dot-product attention: batch and heads may be split, queries where the mask allows, and
queries and keys together, which then go round."""

from math import prod

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    slot,
)


def rule(op: Op, graph: Graph) -> Rule | None:
    """q[..., h, l, e] k[..., g, s, e] v[..., g, s, f] (mask[..., l, s]) -> [..., h, l, f].

    With grouped queries h = g x r: each of the g key heads serves r query heads in a row. The mask
    has all keys even where they are split.
    """
    if name_of(op) != "scaled_dot_product_attention":
        return None
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
    whole = {"s", "m", "e", "f"} | ({"l"} if given(op, "is_causal") else set())
    out = (*batch, *grouped, ("l",), ("f",))
    assert prod(sizes.values()) == (query[-3] if len(query) >= 3 else 1)
    return make_rule(op, graph, inputs, [out], sizes=sizes, whole=whole, together=together)
