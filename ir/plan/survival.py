"""Whether a plan's training state outlives a part of its cluster: what of it lies elsewhere, too.

State is parameters and what the optimizer keeps. Ranks that differ only in their replica hold the
same, but for the rows that ZeRO gives each rank of `dp_shard`, and of axes that are folded with it
(`ir.plan.folded`); which those are is not asked, so that each way must outlive it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal, get_args

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.finding import Finding, few
from meshwright.ir.plan.folded import folded, folds_of
from meshwright.ir.plan.plan import Plan, Stage

Part = Literal["any node", "any device"]
WHOLE_AXES = frozenset({"cp"})
"""Model axes on which every rank has whole parameters."""


def part_named(text: str) -> Part:
    """What is to be lost; PlanError unless it is one of the two."""
    for known in get_args(Part):
        if text == known:
            found: Part = known
            return found
    raise PlanError(f"survives={text!r} is none of {', '.join(map(repr, get_args(Part)))}")


def lost_with(plan: Plan, cluster: Cluster, part: Part) -> dict[int, tuple[int, ...]]:
    """Stage -> the nodes (or devices) of which each alone has some of the stage's state."""
    nodes = cluster.node_numbers if part == "any node" else range(cluster.num_devices)
    found = {
        index: tuple(sorted(set[int]().union(*[_alone(view, nodes) for view in _views(stage)])))
        for index, stage in enumerate(plan.stages)
    }
    return {index: alone for index, alone in found.items() if alone}


def _views(stage: Stage) -> tuple[Stage, ...]:
    """The stage as it may be for parameters."""
    return tuple([folded(stage, fold) for fold in folds_of(stage.model)])


def _alone(stage: Stage, part_of: Sequence[int]) -> set[int]:
    """Parts that are the only ones with something."""
    shard = stage.mesh.get("dp_shard", 1)
    own = _keeps_its_own(stage)
    split = own or stage.is_sharded or any(c.zero for c in stage.by_parameter.values())
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for position, rank in enumerate(stage.devices):
        replica, model = divmod(position, stage.model_size)
        piece = replica if own else replica % shard if split else 0
        holders[_without_copies(stage, model), piece].add(part_of[rank])
    return {part for parts in holders.values() if len(parts) == 1 for part in parts}


def _keeps_its_own(stage: Stage) -> bool:
    """Whether a form may keep on each rank what no other has; a form's table does not say of it
    what others could make again."""
    named = (stage.sync, stage.store, *(c.sync for c in stage.by_parameter.values()),
             *(c.store for c in stage.by_parameter.values()))  # fmt: skip
    return any(choice is not None for choice in named)


def _without_copies(stage: Stage, model: int) -> int:
    """The number of a rank among those of a replica that have different parameters."""
    found, step = 0, 1
    for axis, size in reversed(stage.model):
        model, at = divmod(model, size)
        if axis not in WHOLE_AXES:
            found, step = found + at * step, step * size
    assert step <= prod(size for _, size in stage.model)
    return found


def survival_findings(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """A note on what of the state outlives any one node, where there are several."""
    if cluster.num_nodes < 2:
        return
    lost = lost_with(plan, cluster, "any node")
    if not lost:
        message = "every part of parameters and optimizer state is on two nodes at least"
        yield Finding("survives", f"any node: {message}", severity="note")
        return
    stage, nodes = next(iter(lost.items()))
    yield Finding(
        "survives",
        f"not any node: stage {stage} has state that node {few(nodes)[1:-1]} alone holds: when "
        "that is lost, only a checkpoint has it",
        "search(..., survives='any node')", "note",
    )  # fmt: skip
