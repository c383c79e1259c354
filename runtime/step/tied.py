"""Sums the gradients of parameters that several stages share, so that their copies stay equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.lower.stored import stored_splits
from meshwright.forms.folding import stage_of
from meshwright.forms.running import Held
from meshwright.forms.sync import exchange_of, store_of
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.lines import Line
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.summed import summed_axes
from meshwright.runtime.checkpoint.shard_boxes import pieces
from meshwright.runtime.world.groups import Groups


@dataclass(frozen=True, slots=True)
class Tie:
    """A trainable parameter with copies in several stages."""

    name: str
    stages: tuple[int, ...]
    matched: bool
    """The stages lay it out alike: ranks at the same position hold the same elements."""
    groups: tuple[Line, ...]
    """If matched, the ranks at each position, else the ranks of all the stages."""


def find_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """The same on every rank."""
    return tuple(
        _tie(graph, plan, name, found)
        for name, found in sorted(shared_by_stages(graph, plan).items())
        if graph.tensors[name].requires_grad
    )


def shared_by_stages(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns the stages, in order, of each parameter that several have, trained or not."""
    stages: dict[str, list[int]] = {}
    for index in range(len(plan.stages)):
        blocks = plan.stage_blocks(graph, index)
        for name in dict.fromkeys(name for block in blocks for name in block.params):
            stages.setdefault(name, []).append(index)
    return {name: tuple(found) for name, found in stages.items() if len(found) > 1}


def _tie(graph: Graph, plan: Plan, name: str, indices: tuple[int, ...]) -> Tie:
    path = graph.tensors[name].fqn
    stages = [stage_of(plan.stages[i], path, summed_axes(plan, graph, i)) for i in indices]
    layouts = {
        (s.dp, s.model, s.mesh.get("dp_shard", 1), s.sync_form, store_of(s),
         "" if exchange_of(s).agrees else str(s.sync),
         frozenset(stored_splits(graph, plan, i, name).items()))
        for i, s in zip(indices, stages, strict=True)
    }  # fmt: skip
    devices = {s.devices for s in stages}
    apart = sum(map(len, devices)) == len({rank for line in devices for rank in line})
    if len(layouts) == 1 and apart:
        lines = {tuple(sorted(set(line))) for line in zip(*devices, strict=True)}
        return Tie(name, indices, True, tuple(sorted(lines)))
    if not all(exchange_of(stage).agrees for stage in stages):
        raise PlanError(
            f"stages {', '.join(map(str, indices))} share {path}, and their replicas train alone "
            "(sync): that takes the same sync, mesh and layout in all of them, on devices of their "
            "own; nearest is no sync"
        )
    union = tuple(sorted({rank for line in devices for rank in line}))
    return Tie(name, indices, False, (union,))


def sum_ties(ties: Sequence[Tie], held: Sequence[Held], groups: Groups, rank: int) -> None:
    """Makes the gradient of each copy the sum of all."""
    for tie in ties:
        mine = [h for h in held if h.param.name == tie.name]
        if not mine:
            continue
        line = next(line for line in tie.groups if rank in line)
        (_sum_matched if tie.matched else _sum_pieces)(mine, groups.of(line))


def gradient(held: Held) -> Tensor:
    """Its gradient; zeros if nothing reached it."""
    if held.tensor.grad is None:
        held.tensor.grad = torch.zeros_like(held.tensor)
    return held.tensor.grad


def _sum_matched(mine: Sequence[Held], group: dist.ProcessGroup | None) -> None:
    total = torch.stack([gradient(h) for h in mine]).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    for h in mine:
        gradient(h).copy_(total)


def _sum_pieces(mine: Sequence[Held], group: dist.ProcessGroup | None) -> None:
    param = mine[0].param
    whole = mine[0].tensor.new_zeros(param.global_shape)
    boxes = {id(h): pieces(h.param.runs, h.rows) for h in mine}
    for h in mine:
        for piece in boxes[id(h)] if h.primary else ():
            piece.of_global(whole).add_(piece.of_local(gradient(h)))
    if group is not None:
        dist.all_reduce(whole, group=group)
    for h in mine:
        for piece in boxes[id(h)]:
            piece.of_local(gradient(h)).copy_(piece.of_global(whole))
