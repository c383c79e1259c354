"""What the kernels that a plan's layout decides save its stages, where its devices can run them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from meshwright.costmodel.block.overlap import NOTHING, Hidden
from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.ops.joint import JointTime, Price
from meshwright.costmodel.ops.routing import routed
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Block
from meshwright.ir.memo import Memo
from meshwright.ir.placed import declined, joint_kernels, peers, used, used_at
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage

if TYPE_CHECKING:
    from meshwright.costmodel.block.block_costs import BlockSpot
    from meshwright.costmodel.cost_cache import CostTables

_peerless: Memo[tuple[object, ...], str] = Memo()

ON_CPU = "on {0} it would be torch's operators, one after the other"


def why_no_kernel(cluster: Cluster, stage: Stage) -> str:
    """Why a stage's devices run no kernel of ours; "" if they do."""
    names = sorted({d.name for d in map(cluster.device, stage.devices) if d.kind != "cuda"})
    return ON_CPU.format(names[0]) if names else ""


def why_no_peers(tables: "CostTables", stage: Stage, axis: str) -> str:
    """Why kernels cannot work on the memory of the other ranks of an axis."""
    known, key = _peerless.of(tables), (stage.devices, stage.model, axis)
    if key not in known:
        known[key] = _why_no_peers(tables.cluster, stage, axis)
    return known[key]


def _why_no_peers(cluster: Cluster, stage: Stage, axis: str) -> str:
    if why := why_no_kernel(cluster, stage):
        return why
    lines = tuple(_lines(stage, axis))
    nodes = max(len({cluster.node_of(rank) for rank in line}) for line in lines)
    if nodes > 1:
        return f"the ranks of {axis} are on {nodes} nodes: they do not see each other's memory"
    if len(lines[0]) > peers.MOST_RANKS:
        return f"{axis} has {len(lines[0])} ranks, a workspace is for {peers.MOST_RANKS} at most"
    return ""


def _lines(stage: Stage, axis: str) -> Iterator[tuple[int, ...]]:
    """The ranks of all lines along a model axis."""
    names = [name for name, _ in stage.model]
    stride = prod(size for _, size in stage.model[names.index(axis) + 1 :])
    reach = stride * dict(stage.model)[axis]
    for start in range(0, len(stage.devices), reach):
        for first in range(start, start + stride):
            yield stage.devices[first : start + reach : stride]


def saved_by_kernels(
    tables: "CostTables",
    plan: Plan,
    index: int,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayout],
    spot: "BlockSpot",
) -> tuple[Hidden, ...]:
    """Per block; nothing where collectives already go on beside other work."""
    stage, kernels = plan.stages[index], used(plan) & joint_kernels()
    if not kernels or stage.overlap != "none" or stage.model_size == 1:
        return ()
    without = declined(plan)
    able = {axis for axis, _ in stage.model if not why_no_peers(tables, stage, axis)}
    return tuple(
        _sum(
            price
            for (kernel, op), price in tables.blocks.joint(
                block, layouts[block.pattern], spot
            ).items()
            if kernel in kernels and (kernel, f"{block.pattern}.{op}") not in without
            and price.axis in able and not price.why
        )
        if able and not stage.keeping(block) else NOTHING
        for block in blocks
    )  # fmt: skip


def with_routing(
    tables: "CostTables",
    plan: Plan,
    index: int,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayout],
    spot: "BlockSpot",
    hidden: tuple[Hidden, ...],
) -> tuple[Hidden, ...]:
    """`hidden` per block, with what the kernel `route` saves where the stage has it."""
    if not runs(tables, plan, index, "route"):
        return hidden
    saved = (tables.blocks.routing(block, layouts[block.pattern], spot) for block in blocks)
    return tuple(
        replace(
            one,
            more_forward_s=one.more_forward_s + less.more_forward_s,
            more_backward_s=one.more_backward_s + less.more_backward_s,
            uncertain_s=one.uncertain_s + less.uncertain_s,
        )
        for less, one in zip(saved, hidden or (NOTHING,) * len(blocks), strict=True)
    )


def routing_saves(walk: Walk) -> Hidden:
    """What the kernel `route` saves in a block."""
    forward_s = backward_s = uncertain_s = 0.0
    for tokens in walk.routes:
        ours, torchs = (routed(tokens, walk.site.device, by) for by in (True, False))
        less = torchs.forward_s - ours.forward_s
        less_backward = torchs.backward_input_s - ours.backward_input_s
        forward_s, backward_s = forward_s - less, backward_s - less_backward
        uncertain_s += ours.band * abs(less + less_backward)
    return Hidden(more_forward_s=forward_s, more_backward_s=backward_s, uncertain_s=uncertain_s)


def kernels_save(prices: Mapping[tuple[str, str], Price], kernels: frozenset[str]) -> Hidden:
    """The most that some of the kernels save of a block's computing, beside its collectives."""
    found = [_sum(iter([price])) for (kernel, _), price in prices.items() if kernel in kernels]
    return Hidden(
        more_forward_s=sum([min(0.0, one.more_forward_s) for one in found]),
        more_backward_s=sum([min(0.0, one.more_backward_s) for one in found]),
    )


def _sum(prices: Iterator[Price]) -> Hidden:
    hidden = NOTHING
    for price in prices:
        forward, backward = price.forward, price.backward
        hidden = Hidden(
            hidden.forward_s + _of_collective(forward),
            hidden.backward_s + _of_collective(backward),
            hidden.more_forward_s + _of_collective(forward) - forward.saved_s,
            hidden.more_backward_s + _of_collective(backward) - backward.saved_s,
            hidden.uncertain_s + price.band * (abs(forward.saved_s) + abs(backward.saved_s)),
        )
    return hidden


def _of_collective(way: JointTime) -> float:
    """What is saved of the collective; the rest is of the ops beside it."""
    return min(way.saved_s, way.sent_s)


def runs(tables: "CostTables", plan: Plan, index: int, kernel: str) -> bool:
    """Whether a stage has a kernel, and devices for it."""
    return kernel in used_at(plan, index) and not why_no_kernel(tables.cluster, plan.stages[index])
