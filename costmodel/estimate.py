"""What a plan is expected to cost: stage times, one simulated step, synchronisation and memory.

No overlap of synchronisation with computation is assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.costmodel.comm import collective_time
from meshwright.costmodel.compute import worst_source
from meshwright.costmodel.memory import State, optimizer_traffic, training_state
from meshwright.costmodel.placement import (
    StageCosts,
    slowdown,
    stage_costs,
    step_cores,
    tied_between,
)
from meshwright.costmodel.simulate import StageTimes, Timeline, simulate
from meshwright.costmodel.tables import CostTables
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import OpClass, Source
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan, Prediction, RankMemory, Stage, StagePrediction

ERROR_BAND: dict[Source, float] = {
    "measured": 0.2,
    "interpolated": 0.25,
    "fitted": 0.3,
    "datasheet": 0.4,
    "assumption": 0.6,
}
"""Relative error of the step time to expect by the least certain input; assumptions themselves."""
_PYTHON_STEP_S = 1e-3
"""Bookkeeping of the runtime per step; assumption."""


@dataclass(frozen=True, slots=True)
class _Sync:
    """Seconds of one stage once per step, after its last backward."""

    gradients_s: float
    parameters_s: float
    optimizer_s: float
    buffer_bytes: int


def estimate(
    graph: Graph, cluster: Cluster, plan: Plan, tables: CostTables | None = None
) -> tuple[Prediction, Timeline]:
    """The prediction for a plan and the timeline it rests on."""
    tables = tables or CostTables(graph, cluster, plan.precision)
    costs = tuple(stage_costs(tables, plan, index) for index in range(len(plan.stages)))
    slow = slowdown(cluster)
    times = tuple(_times(cost, slow) for cost in costs)
    timeline = simulate(tables.schedule(plan.schedule), times, cores=step_cores(cluster))
    syncs = tuple(_sync(tables, plan, i, cost, slow) for i, cost in enumerate(costs))
    tied = tied_between(tables, plan, costs)
    ends = [
        end + sync.gradients_s + sync.parameters_s + sync.optimizer_s + tied.get(i, 0.0)
        for i, (end, sync) in enumerate(zip(timeline.stage_end_s, syncs, strict=True))
    ]
    step_s = max(ends) + _PYTHON_STEP_S + _reports(tables, plan)
    source = worst_source([cost.cost.source for cost in costs])
    memories = _memories(tables, plan, costs, syncs, timeline)
    stages = tuple(
        StagePrediction(
            forward_s=time.forward_s,
            backward_s=time.backward_s,
            send_s=time.send_s,
            sync_s=sync.gradients_s + sync.parameters_s + tied.get(i, 0.0),
            optimizer_s=sync.optimizer_s,
            memory=memories[i],
        )
        for i, (time, sync) in enumerate(zip(times, syncs, strict=True))
    )
    prediction = Prediction(
        step_s=step_s,
        samples_per_s=plan.global_batch_size / step_s,
        error_band=ERROR_BAND[source],
        source=source,
        stages=stages,
    )
    return prediction, timeline


def _times(stage: StageCosts, slow: float) -> StageTimes:
    """Times with cores to itself: the simulator slows what shares them.

    Communication was measured with everybody at it, so it must not be slowed again.
    """
    cost = stage.cost
    spare = 1 - 1 / slow
    forward = cost.forward_s - spare * cost.comm_forward_s + stage.gather_s
    inputs = cost.backward_input_s - spare * cost.comm_backward_s + stage.gather_s
    weights = cost.backward_weight_s + stage.scatter_s
    return StageTimes(
        forward_s=forward,
        backward_s=inputs + weights,
        backward_input_s=inputs,
        backward_weight_s=weights,
        send_s=stage.send_s,
        saved_bytes=cost.saved_bytes + stage.border_bytes,
        processes=stage.processes,
    )


def _sync(tables: CostTables, plan: Plan, index: int, stage: StageCosts, slow: float) -> _Sync:
    """Gradient reduction, parameter gathering and the optimizer of one stage."""
    spec = plan.stages[index]
    shard = spec.mesh.get("dp_shard", 1)
    cost = stage.cost
    trained = sum(n for name, n in cost.params.items() if name in tables.trained)
    gradients = 0.0
    if spec.zero == 0:
        gradients += collective_time(Primitive.ALL_REDUCE, trained, stage.spot.dp_levels)
    else:
        if spec.zero == 1:
            gradients += collective_time(Primitive.REDUCE_SCATTER, trained, stage.shard_levels)
        gradients += collective_time(Primitive.ALL_REDUCE, trained / shard, stage.replicate_levels)
    summed = sum(cost.params[name] for name in cost.tp_sums)
    gradients += (
        collective_time(Primitive.ALL_REDUCE, summed, stage.spot.tp_levels) if summed else 0
    )
    gather = (
        collective_time(Primitive.ALL_GATHER, trained, stage.shard_levels)
        if spec.zero in (1, 2)
        else 0.0
    )
    traffic = optimizer_traffic(trained, plan.optimizer, zero=spec.zero, dp_shard=shard)
    device = stage.device
    rate = device.memory_bandwidth_bytes_per_s * device.efficiency.get(OpClass.ELEMENTWISE, 1.0)
    tensors = sum(name in tables.trained for name in cost.params)
    update = traffic / rate + tensors * device.overhead_s
    # Plain data parallel reduces the gradients where they lie; ZeRO packs them.
    return _Sync(gradients, gather, update * slow, trained if spec.zero in (1, 2) else 0)


def _reports(tables: CostTables, plan: Plan) -> float:
    """The loss of a step is summed over all ranks."""
    everybody = sorted({rank for stage in plan.stages for rank in stage.devices})
    return collective_time(Primitive.ALL_REDUCE, 8, tables.levels(everybody))


def _memories(
    tables: CostTables,
    plan: Plan,
    costs: Sequence[StageCosts],
    syncs: Sequence[_Sync],
    timeline: Timeline,
) -> tuple[RankMemory, ...]:
    """Per stage, the memory of its devices with all the stages they hold."""
    schedule = tables.schedule(plan.schedule)
    owner = {a.stage: rank for rank, row in enumerate(schedule.ranks) for a in row}
    by_rank: dict[int, list[int]] = {}
    for index in range(len(plan.stages)):
        by_rank.setdefault(owner[index], []).append(index)
    made = {
        rank: _rank_memory(tables, plan, held, costs, syncs, timeline.peak_bytes[rank])
        for rank, held in by_rank.items()
    }
    return tuple(made[owner[index]] for index in range(len(plan.stages)))


def _rank_memory(
    tables: CostTables,
    plan: Plan,
    held: Sequence[int],
    costs: Sequence[StageCosts],
    syncs: Sequence[_Sync],
    activations: int,
) -> RankMemory:
    states = [_state(tables, plan.stages[i], costs[i], plan.optimizer) for i in held]
    borders = sum(2 * (costs[i].border_bytes + costs[i].entry_bytes) for i in held)
    gathered = max(
        (max(costs[i].cost.block_params) for i in held if plan.stages[i].zero == 3), default=0
    )
    return RankMemory(
        parameters_bytes=sum(state.parameters_bytes for state in states),
        gradients_bytes=sum(state.gradients_bytes for state in states),
        optimizer_bytes=sum(state.optimizer_bytes for state in states),
        activations_bytes=activations,
        communication_bytes=borders + gathered + max(syncs[i].buffer_bytes for i in held),
        workspace_bytes=max(costs[i].cost.workspace_bytes for i in held),
    )


def _state(tables: CostTables, stage: Stage, costs: StageCosts, optimizer: str) -> State:
    params = costs.cost.params
    trained = sum(n for name, n in params.items() if name in tables.trained)
    return training_state(
        sum(params.values()),
        trained,
        optimizer=optimizer,
        zero=stage.zero,
        dp_shard=stage.mesh.get("dp_shard", 1),
    )
