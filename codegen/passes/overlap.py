"""Passes that put products of `codegen.collectives.products` in the place of a conversion and
matrix products.

A pass changes the graph of a block; where its pattern does not hold nothing changes.
"""

from collections.abc import Iterator
from operator import getitem
from typing import cast

from torch import fx
from torch.fx.node import Argument

from meshwright.codegen.collectives.products import columns, rows
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive

_KINDS = {
    "aten.linear.default": "linear", "aten.addmm.default": "addmm", "aten.mm.default": "mm",
}  # fmt: skip
_INPUT = {"linear": 0, "mm": 0, "addmm": 1}
"""Where the product's input stands among its arguments."""


def overlap_gradients(module: fx.GraphModule) -> int:
    """Column-parallel products get their input's gradient summed while the weights' is computed;
    how many conversions were found."""
    found = 0
    for node in list(module.graph.nodes):
        if _is_move(node) and node.kwargs.get("backward") in COMMUNICATES and _are_products(node):
            _put_columns(module.graph, node)
            found += 1
    return _done(module, found)


def split_rows(module: fx.GraphModule) -> int:
    """Row-parallel products are summed over the axis in two halves; how many were found."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op == "call_method" and node.target == Primitive.ALL_REDUCE and (
            node.kwargs.get("backward") == Primitive.IDENTITY
        ):  # fmt: skip
            product = cast(fx.Node, node.args[1])
            if _kind(product) and len(product.users) == 1:
                _put_rows(module.graph, node, product)
                found += 1
    return _done(module, found)


def _done(module: fx.GraphModule, found: int) -> int:
    if found:
        module.graph.lint()
        module.recompile()
    return found


def _is_move(node: fx.Node) -> bool:
    return node.op == "call_method" and set(node.kwargs) <= {"backward"}


def _kind(node: fx.Node) -> str:
    """`linear`, `addmm` or `mm`; empty if it is none, or one with more arguments."""
    kind = _KINDS.get(str(node.target), "") if node.op == "call_function" else ""
    return "" if node.kwargs or len(node.args) > 3 else kind


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight, and what is added."""
    args = cast(tuple[fx.Node, ...], product.args)
    if _kind(product) == "addmm":
        return args[1], args[2], args[0]
    return args[0], args[1], args[2] if len(args) > 2 else None


def _are_products(move: fx.Node) -> bool:
    """Whether all that reads the value are products of it with what is there before it."""
    users = list(move.users)
    if not users or not all(_kind(user) for user in users):
        return False
    before = set(_before(min(users, key=_places(move.graph).__getitem__)))
    return all(
        _operands(user)[0] is move
        and all(x is None or (x is not move and x in before) for x in _operands(user)[1:])
        for user in users
    )


def _before(node: fx.Node) -> Iterator[fx.Node]:
    for other in node.graph.nodes:
        if other is node:
            return
        yield other


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _put_columns(graph: fx.Graph, move: fx.Node) -> None:
    place = _places(graph)
    users = sorted(move.users, key=place.__getitem__)
    products = tuple((_kind(user), *_operands(user)[1:]) for user in users)
    comm, x, axis, *where = move.args
    kwargs: dict[str, Argument] = {
        "products": cast(Argument, products), "forward": str(move.target),
        "backward": move.kwargs["backward"],
    }  # fmt: skip
    if where:
        kwargs["where"] = tuple(where)
    with graph.inserting_before(users[0]):
        made = graph.create_node(
            "call_function", columns, (comm, x, axis), kwargs, f"{users[0].name}_columns"
        )
        made.meta = dict(users[0].meta)
        made.meta["comment"] = f"{move.meta['comment']}, beside the weights' gradients"
        for index, user in enumerate(users):
            result = graph.call_function(getitem, (made, index))
            result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
    for user in users:
        graph.erase_node(user)
    graph.erase_node(move)


def _put_rows(graph: fx.Graph, move: fx.Node, product: fx.Node) -> None:
    x, weight, added = _operands(product)
    comm, _, axis = move.args
    with graph.inserting_before(move):
        kwargs: dict[str, Argument] = {"kind": _kind(product), "weight": weight, "added": added}
        made = graph.create_node(
            "call_function", rows, (comm, x, axis), kwargs, f"{product.name}_rows"
        )
    made.meta = dict(product.meta)
    made.meta["comment"] = f"{move.meta['comment']}, in two halves"
    move.replace_all_uses_with(made)
    graph.erase_node(move)
    graph.erase_node(product)
