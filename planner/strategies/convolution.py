"""Convolutions, pooling and batch-norm: samples, channels and space may be split.

Where space is split, the ranks exchange what windows read beyond their parts.
"""

from collections.abc import Callable

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
    slot,
    slots,
)
from meshwright.ir.graph.windows import windows

POOLS = frozenset(
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "_adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d".split()
)


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op)
    if name in POOLS:
        return _pool(op, graph)
    found = _RULES.get(name)
    return found(op, graph) if found else None


def _convolution(op: Op, graph: Graph) -> Rule | None:
    """x[n, c, ...] weight[o, c, ...] (bias[o]) -> [n, o, ...].

    With groups, c = g x i and o = g x j, the weight is [g x j, i], and only whole groups are split.
    """
    if given(op, "transposed"):
        return None
    x, weight = input_shapes(op, graph)[:2]
    groups = int(str(given(op, "groups", 1)))
    if len(x) != len(weight):
        return None
    space = len(x) - 2
    channels: tuple[str, ...]
    kernel: Dims
    out: tuple[str, ...]
    if groups == 1:
        channels, kernel, out = ("c",), (("o",), ("c",)), ("o",)
        sizes, whole = {"c": weight[1], "o": weight[0]}, set[str]()
    else:
        sizes = {"g": groups, "i": weight[1], "j": weight[0] // groups}
        channels = ("g",) + ("i",) * (sizes["i"] > 1)
        out = ("g",) + ("j",) * (sizes["j"] > 1)
        kernel, whole = (out, ("i",)), {"i", "j"}
    inputs: list[Dims] = [
        (("n",), channels, *letters("x", space)),
        (*kernel, *letters("k", space)),
        (out,),
    ]
    places = letters("y", space)
    whole |= {f for d in (*letters("x", space), *letters("k", space), *places) for f in d}
    added = [2] if slot(op, "bias") is not None else []
    return make_rule(
        op, graph, inputs[: len(op.inputs)], [(("n",), out, *places)],
        sizes=sizes, whole=whole, added=added, linear=[{0, *added}],
        plain=(halos := _halos(op, graph)), together=halos,
    )  # fmt: skip


def _pool(op: Op, graph: Graph) -> Rule:
    """All outputs (values, indices) keep samples and channels."""
    x, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    lead = len(x) - (1 if "1d" in op.target else 3 if "3d" in op.target else 2)
    dims = letters("d", lead)
    inside = (*dims, *letters("x", len(x) - lead))
    out = (*dims, *letters("y", len(target) - lead))
    whole = {f for d in (*inside[lead:], *out[lead:]) for f in d}
    linear = [{0}] if "avg" in op.target else []
    halos = _halos(op, graph)
    return make_rule(
        op, graph, [inside], [out] * len(op.outputs), whole=whole, linear=linear, plain=halos,
        together=halos,
    )  # fmt: skip


def _halos(op: Op, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Dims of space that may be split, with those of the output."""
    found = windows(op, input_shapes(op, graph), output_shapes(op, graph)[0])
    return {f"halo{i}": (f"x{i}", f"y{i}") for i, window in enumerate(found) if window}


def _batch_norm(op: Op, graph: Graph) -> Rule | None:
    """x[n, c, ...]; statistics are summed over samples and space by the generated code."""
    if len(op.outputs) != 1:
        return None
    shapes = input_shapes(op, graph)
    space = letters("x", len(shapes[0]) - 2)
    running = {*slots(op, "running_mean"), *slots(op, "running_var")}
    inputs: list[Dims] = [(("n",), ("c",), *space)]
    inputs += [(("w",),) if i in running else (("c",),) for i in range(1, len(shapes))]
    return make_rule(op, graph, inputs, [inputs[0]], whole="w", plain="c", free=running)


_RULES: dict[str, Callable[[Op, Graph], Rule | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "batch_norm": _batch_norm,
}
