"""What the cost model expects of a plan in the terms in which a run is measured."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.costmodel.comm.comm import Levels, collective_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.explain.compare import (
    CollectiveKind,
    Expected,
    durations,
    expected_of,
    kind_of,
    waiting,
)
from meshwright.costmodel.fit.learn import BlockUse
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.costmodel.stage.placement import axis_ranks, stage_costs
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.op_messages import SHIFT
from meshwright.ir.plan.plan import MESH_AXES, Plan, Stage
from meshwright.ir.profile.measured import Measured
from meshwright.ir.profile.profile import GroupShape


def expected_in_detail(
    plan: Plan, tables: CostTables, runs: Sequence[Measured]
) -> tuple[Expected, Timeline]:
    """A new estimate with these tables, whose actions share cores and links as in the run."""
    prediction, timeline = estimate(tables.graph, tables.cluster, plan, tables)
    known = expected_of(replace(plan, predicted=prediction))
    kinds = {kind_of(c) for m in runs for c in m.collectives}
    return (
        replace(
            known,
            actions=durations(timeline),
            waiting=waiting(timeline),
            collectives=_collectives(plan, tables, kinds),
        ),
        timeline,
    )


def _collectives(
    plan: Plan, tables: CostTables, kinds: Iterable[CollectiveKind]
) -> Mapping[CollectiveKind, float]:
    """Those along one axis of a stage. The wait for a shift depends on what goes on beside it."""
    found = {}
    for kind in kinds:
        if kind.primitive == SHIFT:
            continue
        if kind.stage >= 0 and kind.axis in ("dp", *MESH_AXES):
            levels = axis_levels(tables, plan.stages[kind.stage], kind.axis)
            found[kind] = collective_time(Primitive(kind.primitive), kind.nbytes, levels)
    return found


def axis_levels(tables: CostTables, stage: Stage, axis: str) -> Levels:
    return tables.levels(axis_ranks(stage, axis))


def block_uses(plan: Plan, tables: CostTables) -> dict[int, list[BlockUse]]:
    """Per stage, the blocks of its slowest replica as a profile has them."""
    found = {}
    named = {layout.name: layout for layout in plan.layouts}
    for index, stage in enumerate(plan.stages):
        cost = stage_costs(tables, plan, index)
        keys = (
            tables.blocks.key(block, named[stage.layouts[block.pattern]], cost.spot)
            for block in cost.blocks
        )
        found[index] = [
            BlockUse(key, mode is True) for key, mode in zip(keys, cost.modes, strict=True)
        ]
    return found


def group_shape(plan: Plan, cluster: Cluster, stage: int, axis: str) -> tuple[GroupShape, int]:
    """The kind of group along an axis of a stage, and how many of them work at once."""
    ranks = axis_ranks(plan.stages[stage], axis)
    nodes = Counter(cluster.node_of(rank) for rank in ranks)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    shape = GroupShape(size=len(ranks), per_node=max(nodes.values()), stride=stride)
    return shape, len(plan.stages[stage].devices) // len(ranks)
