"""Whether a plan's training state outlives a part of its cluster: what of it lies elsewhere, too.

State is parameters and what the optimizer keeps. Ranks that differ only in their replica, or in an
axis that is folded into it, hold the same, but for the rows that ZeRO gives each of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.finding import Finding, few
from meshwright.ir.plan.folded import Fold, folded, folds_of
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
    found = {index: tuple(sorted(_alone(stage, nodes))) for index, stage in enumerate(plan.stages)}
    return {index: alone for index, alone in found.items() if alone}


def _alone(stage: Stage, part_of: Sequence[int]) -> set[int]:
    """Parts that are the only ones with something."""
    own = _keeps_its_own(stage)
    holders: dict[tuple[Fold, int, int], set[int]] = defaultdict(set)
    for fold in _folds(stage):
        seen = folded(stage, fold)
        shard = seen.mesh.get("dp_shard", 1)
        split = not own and _is_split(seen)
        for position, rank in enumerate(seen.devices):
            replica, model = divmod(position, seen.model_size)
            piece = replica if own else replica % shard if split else 0
            holders[fold, model, piece].add(part_of[rank])
    return {part for parts in holders.values() if len(parts) == 1 for part in parts}


def _is_split(seen: Stage) -> bool:
    """Whether ranks of dp_shard have different rows of any parameter's state."""
    levels = {seen.zero, *(c.zero for c in seen.by_parameter.values() if c.zero is not None)}
    plain = replace(seen, by_parameter={})
    return any(exchange_of(replace(plain, zero=n)).is_split("optimizer") for n in levels)


def _folds(stage: Stage) -> list[Fold]:
    """Those of its parameters: along `cp` all of them lie whole, along `ep` those of no expert."""
    whole = {axis for axis, _ in stage.model} & WHOLE_AXES
    return [fold for fold in folds_of(stage.model) if whole <= set(fold)]


def _keeps_its_own(stage: Stage) -> bool:
    """Whether a form may keep on each rank what no other has; a form's table does not say of it
    what others could make again."""
    named = (stage.sync, stage.store, *(c.sync for c in stage.by_parameter.values()),
             *(c.store for c in stage.by_parameter.values()))  # fmt: skip
    return any(choice is not None for choice in named)


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
