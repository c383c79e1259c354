"""Norms: rows, samples, groups of channels, or with statistics over all ranks, channels."""

from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op, Ref
from meshwright.ir.graph.op_facts import CallHalves, CallPart, OpFacts, named, per_element
from meshwright.ir.graph.op_forms import sharded, without
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
    slots,
)
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import R, Shard, Strategy
from meshwright.ir.layout.op_messages import Inner, Operands
from meshwright.ir.ops.convolution import split_groups


def _norm(op: Op, graph: Graph) -> Rule:
    """x[..., n1, n2], weight and bias [n1, n2]: the leading dims may be split."""
    shape, *params = input_shapes(op, graph)
    size = given(op, "normalized_shape")
    assert isinstance(size, tuple)
    lead = len(shape) - len(size)
    dims = (*letters("d", lead), *letters("n", len(size)))
    outs: list[Dims] = [dims[: len(s)] for s in output_shapes(op, graph)]
    outs = [(*o[:lead], *(() for _ in o[lead:])) if k else o for k, o in enumerate(outs)]
    inputs = [dims, *(dims[lead:] for _ in params)]
    return make_rule(op, graph, inputs, outs, whole={f"n{i}" for i in range(len(size))})


def _group_norm(op: Op, graph: Graph) -> Rule:
    """x[N, C, ...]: samples and whole groups of channels."""
    shape, *params = input_shapes(op, graph)
    groups = int(str(given(op, "num_groups")))
    channel = ("g",) * (groups > 1) + ("c",) * (shape[1] > groups)
    sizes = {"g": groups, "c": shape[1] // groups}
    x = (("n",), channel, *letters("d", len(shape) - 2))
    whole = {"c", *(f"d{i}" for i in range(len(shape) - 2))}
    return make_rule(op, graph, [x, *((channel,) for _ in params)], [x], sizes=sizes, whole=whole)


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


def _statistics(site: OpSite, form: Form) -> Form:
    if form.arg("training") is not True:
        return form
    shape, shards = site.input(0).shape, dict(site.input_shards(0))
    axes = tuple(axis for axis, shard in shards.items() if shard.dim != 1)
    count = 1
    for dim, size in enumerate(shape):
        if dim != 1:
            count *= _in_microbatch(site, shards, dim, size)
    extra: dict[str, Value] = {"axes": axes, "count": count}
    channels = [axis for axis, shard in shards.items() if shard.dim == 1]
    running = form.arg("running_mean")
    if channels and isinstance(running, In) and not site.is_split(running.index, 0):
        extra |= _channels(site, channels)
    return sharded(without(form, "training"), "batch_norm", **extra)


def _channels(site: OpSite, axes: list[str]) -> dict[str, Value]:
    split = site.split(axes[0], site.input(0).shape, site.input_layout(0))
    if len(axes) > 1 or split.outer > 1:
        raise PlanError(
            f"{site.op.key}: channels are split over {', '.join(axes)}, but running statistics "
            "are whole; split them alike"
        )
    return {"channel_axis": axes[0], "channels": split.sizes}


def _in_microbatch(site: OpSite, shards: dict[str, Shard], dim: int, size: int) -> int:
    """Elements of a dim that all ranks together hold for one micro-batch."""
    for axis, shard in shards.items():
        along = site.axes[axis]
        if shard.dim == dim and along.shares:
            size = size // along.whole * sum(along.shares)
    return size


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Sums of values and of squares for each channel; of split channels the statistics, where
    each rank keeps them all."""
    x, placed = inputs[0], strategy.inputs[0]
    if not isinstance(placed, Shard) or dict(op.args).get("training") is False:
        return ()
    channels = x.nbytes // max(prod(x.shape), 1) * x.shape[1]
    if placed.dim == 1:
        kept = zip(op.inputs, strategy.inputs, strict=True)
        whole = sum(p == R and name in _running(op) for name, p in kept)
        return (Inner(Primitive.ALL_GATHER, channels, whole, backward=False),) if whole else ()
    return tuple(Inner(Primitive.ALL_REDUCE, channels, 2, b, of_replica=True)
                 for b in (False, True))  # fmt: skip


def _shared(op: Op, part: CallPart) -> tuple[int, int]:
    """All is computed in float32 or wider: the result before it is cast, and in the backward the
    values less their mean, which become their gradient, times the gradient that is given."""
    nbytes = prod(part.shapes[0]) * max(part.width, 4)
    narrow = prod(part.shapes[0]) * part.width
    is_cast, wants = part.width < 4, part.wanted[0]
    return nbytes * is_cast, 2 * nbytes - narrow * wants


def _root_mean_square(op: Op, part: CallPart) -> int:
    """On a CPU torch's are operators one after the other, in float32. For each value there is its
    gradient by what divides it, that of the mean, and three of its square. The values that a weight
    multiplies have gone by then. Where values need no gradient, there is but the weight's."""
    if part.device_kind != "cpu":
        return 0
    values, weight = prod(part.shapes[0]), bool(slots(op, "weight"))
    wide = max(part.width, 4)
    if not part.wanted[0]:
        return wide * values * (1 + (part.width < wide))
    return wide * values * (5 - weight) - part.width * values


def _root_mean_square_halves(op: Op, part: CallPart) -> CallHalves | None:
    """Nothing that the forward kept goes. The product with the weight is one of these operators,
    and has the gradient of its result, which was cast if values are narrow."""
    if part.device_kind != "cpu":
        return None
    weights = sum([prod(part.shapes[i]) for i in slots(op, "weight")])
    values, wide = prod(part.shapes[0]), max(part.width, 4)
    cast = wide * values * (weights > 0 and part.width < wide)
    product = wide * (values + weights) if weights else 0
    return CallHalves(
        first=5 * wide * values + cast - part.width * values, kept=cast,
        keeps_given=weights > 0 and not cast, runs_again=False, growing=product, adding=product,
        adds_early=part.width == wide,
    )  # fmt: skip


def _running(op: Op) -> set[str]:
    found = (dict(op.args).get(name) for name in ("running_mean", "running_var"))
    return {ref.name for ref in found if isinstance(ref, Ref)}


# Where autocast leaves norms alone values stay as they come, weights and statistics float32.
_NORM = OpFacts(op_class=OpClass.NORMALIZATION, autocast="first")
_BATCH = replace(_NORM, mixes_samples=True)
FACTS = {
    # On a CPU torch runs it one operator after the other, as we do.
    **named(
        "rms_norm",
        replace(
            _NORM,
            rule=_norm,
            flops=per_element(6),
            torch_passes=3.5,
            temporaries=_root_mean_square,
            lets_go=True,
            widens=True,
            halves=_root_mean_square_halves,
        ),
    ),
    **named("layer_norm", replace(_NORM, rule=_norm, flops=per_element(8))),
    **named("native_layer_norm", replace(_NORM, rule=_norm)),
    **named(
        "group_norm",
        replace(_NORM, rule=_group_norm, flops=per_element(8), form=split_groups("num_groups")),
    ),
    **named(
        "batch_norm",
        replace(
            _BATCH,
            by_batch=True,
            rule=_batch_norm,
            flops=per_element(8),
            form=_statistics,
            messages=_messages,
            shared=_shared,
        ),
    ),
    **named("native_batch_norm cudnn_batch_norm _native_batch_norm_legit", _BATCH),
    **named("instance_norm", _NORM),
}
