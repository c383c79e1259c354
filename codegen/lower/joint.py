"""Builds the calls of kernels that take over an op with the collective beside it."""

from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from typing import TYPE_CHECKING, cast

from torch import fx
from torch.fx.node import Argument

from meshwright.codegen.collectives import together
from meshwright.codegen.sharded.sharded import kernel_of
from meshwright.ir.graph.graph import Block, Op
from meshwright.ir.graph.op_site import OpSite
from meshwright.ir.kernels import load
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Layout, Shard, Strategy
from meshwright.ir.layout.nesting import local_split
from meshwright.ir.placed import joint_spots
from meshwright.ir.placed.spots import KernelSpot

if TYPE_CHECKING:
    from meshwright.codegen.lower.builder import Builder
    from meshwright.codegen.lower.stage_context import Where

Strategies = Callable[[Op], Mapping[str, Strategy]]


def spots_of(at: "Where", block: Block) -> dict[str, tuple[str, KernelSpot]]:
    """`Op.key` -> kernel and spot, of what the plan's kernels take over in a block."""
    return joint_spots(at.plan, at.graph, at.stage, block)


def skipped(found: Mapping[str, tuple[str, KernelSpot]]) -> frozenset[str]:
    """Keys of ops that are part of another's call."""
    return frozenset(
        op.key for _, spot in found.values() for op in (*spot.others, spot.via) if op is not None
    )


def add(builder: "Builder", kernel: str, spot: KernelSpot, strategies: Strategies) -> None:
    """One call in the place of the collective and the ops."""
    put = _ADD.get(kernel) or load(kernel).add
    put(builder, spot, strategies)


def site_of(builder: "Builder", op: Op, strategies: Strategies) -> OpSite:
    return OpSite(op, builder.graph.tensors, strategies(op), builder.axes, builder.coordinates)


def inputs_of(builder: "Builder", site: OpSite, but: int) -> Iterator[fx.Node | None]:
    """What an op reads, as it wants it; None for the operand that the call converts itself."""
    for i, name in enumerate(site.op.inputs):
        yield None if i == but else builder.need(name, site.input_layout(i))


def call_of(
    builder: "Builder",
    kernel: str,
    spot: KernelSpot,
    args: tuple[Argument, ...],
    backward: Primitive,
) -> fx.Node:
    """Add the call of a kernel, with the axis that it sends on."""
    assert spot.conversion is not None
    target = together.FUNCTIONS.get(f"sharded.{kernel}") or kernel_of(kernel)
    node = builder.fx.create_node(
        "call_function", target, (builder.comm, *args), {"axis": spot.axis},
        f"{builder.named(spot.op.outputs[0])}_joint",
    )  # fmt: skip
    text = f"{spot.conversion.forward} over {spot.axis} and {spot.op.key} as one"
    node.meta["comment"] = f"{text}; backward {backward}"
    return node


def _reduce_norm(builder: "Builder", spot: KernelSpot, strategies: Strategies) -> None:
    site = site_of(builder, spot.op, strategies)
    assert spot.conversion is not None
    inputs = list(inputs_of(builder, site, spot.index))
    wanted = site.input_layout(spot.index)
    if spot.via is None:
        name = spot.op.inputs[spot.index]
        summand = builder.need(name, {**wanted, spot.axis: spot.conversion.source})
    else:
        summand = _viewed(builder, spot, strategies)
    norm = dict(spot.op.args)
    terms: list[Argument] = [
        inputs[1 - spot.index],
        inputs[2],
        inputs[3] if len(inputs) > 3 else None,
    ]
    node = call_of(
        builder,
        "reduce_norm",
        spot,
        (summand, *terms, cast(float, norm["eps"])),
        Primitive.IDENTITY,
    )
    builder.outputs(site, node)


def _viewed(builder: "Builder", spot: KernelSpot, strategies: Strategies) -> fx.Node:
    """The view, of summands in place of their sum."""
    assert spot.via is not None and spot.conversion is not None
    site = site_of(builder, spot.via, strategies)
    wanted = {**site.input_layout(0), spot.axis: spot.conversion.source}
    return builder.call(site, [builder.need(spot.via.inputs[0], wanted)], spot.via.outputs[0])


def _gather_linear(builder: "Builder", spot: KernelSpot, strategies: Strategies) -> None:
    sites = [site_of(builder, op, strategies) for op in (spot.op, *spot.others)]
    assert spot.conversion is not None
    wanted = {**sites[0].input_layout(0), spot.axis: spot.conversion.source}
    name = spot.op.inputs[0]
    operands = [list(inputs_of(builder, site, 0)) for site in sites]
    args: tuple[Argument, ...] = (
        builder.need(name, wanted),
        tuple(found[1] for found in operands),
        tuple(found[2] if len(found) > 2 else None for found in operands),
    )
    node = call_of(builder, "gather_linear", spot, args, Primitive.REDUCE_SCATTER)
    node.kwargs = {**node.kwargs, **_part(builder, name, spot.conversion.source, spot.axis, wanted)}
    for i, site in enumerate(sites):
        made = builder.fx.call_function(getitem, (node, i))
        builder.made_as(site.op.outputs[0], made, site.output_layout(0))


def _linear_scatter(builder: "Builder", spot: KernelSpot, strategies: Strategies) -> None:
    site = site_of(builder, spot.op, strategies)
    assert spot.conversion is not None
    x, weight, *bias = inputs_of(builder, site, -1)
    target, name = spot.conversion.target, spot.op.outputs[0]
    layout = {**site.output_layout(0), spot.axis: target}
    args = (x, weight, bias[0] if bias else None)
    node = call_of(builder, "linear_scatter", spot, args, Primitive.ALL_GATHER)
    node.kwargs = {**node.kwargs, **_part(builder, name, target, spot.axis, layout)}
    builder.made_as(name, node, layout)


def _part(
    builder: "Builder", name: str, shard: object, axis: str, layout: Layout
) -> dict[str, Argument]:
    assert isinstance(shard, Shard)
    size = builder.graph.tensors[name].shape[shard.dim]
    own = local_split(size, axis, shard, layout, builder.axes, builder.coordinates)
    return {"dim": shard.dim, "sizes": own.sizes}


_ADD: dict[str, Callable[["Builder", KernelSpot, Strategies], None]] = {
    "reduce_norm": _reduce_norm,
    "gather_linear": _gather_linear,
    "linear_scatter": _linear_scatter,
}
