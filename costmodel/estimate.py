"""What a plan is expected to cost: stage times, one simulated step, memory, and how sure that is.

Loading data is not part of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.comm.comm import Levels, collective_band, collective_time
from meshwright.costmodel.cores import slowdown, step_cores
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.explain.breakdown import Bands, breakdown, error_band
from meshwright.costmodel.memory.rank_memory import rank_memories
from meshwright.costmodel.ops.compute import worst_source
from meshwright.costmodel.ops.overheads import TALKING
from meshwright.costmodel.simulate.compiled_schedule import table_of
from meshwright.costmodel.simulate.simulate import HiddenTogether, StageTimes
from meshwright.costmodel.simulate.step import (
    Ending,
    StepTimes,
    by_stage,
    in_turn,
    slowed,
    take_step,
)
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.costmodel.stage.courses import together
from meshwright.costmodel.stage.early_recompute import early_models
from meshwright.costmodel.stage.late import lagging_s, unhidden_s
from meshwright.costmodel.stage.placement import (
    StageCosts,
    axis_ranks,
    stage_costs,
    tied_between,
)
from meshwright.costmodel.stage.program import Overlap, talk
from meshwright.costmodel.stage.stage_model import StageModel, stage_model
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.alone import lone_replicas
from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.graph.routed_graph import with_routing
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Partial, parse_strategy
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction, StagePrediction
from meshwright.ir.styles import Style


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction and all that it rests on."""

    prediction: Prediction
    stepped: StepTimes
    costs: tuple[StageCosts, ...]
    models: tuple[StageModel, ...]
    times: tuple[StageTimes, ...]


def estimate(
    graph: Graph, cluster: Cluster, plan: Plan, tables: CostTables | None = None
) -> tuple[Prediction, Timeline]:
    """The prediction for a plan and the timeline it rests on."""
    found = estimate_all(graph, cluster, plan, tables)
    return found.prediction, found.stepped.timeline


def estimate_all(
    graph: Graph,
    cluster: Cluster,
    plan: Plan,
    tables: CostTables | None = None,
    *,
    detail: bool = False,
) -> Estimate:
    """The same with everything that reports and traces need; `detail`: a log of what ran when."""
    tables = tables or CostTables(
        with_routing(graph, plan.routing), cluster, plan.precision, style=plan.style
    )
    indices = range(len(plan.stages))
    costs = tuple(stage_costs(tables, plan, i) for i in indices)
    models = tuple(stage_model(tables, plan, i, costs[i]) for i in indices)
    slow = slowdown(tables.cluster)
    schedule = tables.schedule(plan.schedule)
    if table_of(schedule).early:
        models = early_models(tables, plan, models)
    beside = together(tables, schedule, costs) if schedule.pairs else {}
    times = tuple(
        _times(costs[i], models[i], slow, beside.get(i, {}), tables.run_as) for i in indices
    )
    owners = by_stage(table_of(schedule).owners)
    tied = tied_between(tables, plan, costs)
    meeting_s = _meeting_s(tables, plan)
    norm_s = None if plan.max_grad_norm is None else meeting_s
    endings = [
        _ending([models[i] for i in own], [tied.get(i, 0.0) for i in own], norm_s, slow)
        for _, own in sorted(owners.items())
    ]
    stepped = take_step(
        schedule, times, endings, meeting_s=meeting_s, cores=step_cores(tables.cluster),
        talking=_talking(models, slow), detail=detail,
    )  # fmt: skip
    owned = [[models[i].sync for i in own] for _, own in sorted(owners.items())]
    if any([lagging_s(sync) for own in owned for sync in own]):
        whole_s = stepped.step_s + _beside_s(tables, plan, costs, models)
        endings = [
            _lagging(ending, own, plan, whole_s, slow)
            for ending, own in zip(endings, owned, strict=True)
        ]
        stepped = take_step(
            schedule, times, endings, meeting_s=meeting_s, cores=step_cores(tables.cluster),
            talking=_talking(models, slow), detail=detail,
        )  # fmt: skip
    prediction = _prediction(tables, plan, costs, models, times, stepped, slow)
    return Estimate(prediction, stepped, costs, models, times)


def _times(
    costs: StageCosts,
    model: StageModel,
    slow: float,
    beside: Mapping[int, HiddenTogether],
    style: Style,
) -> StageTimes:
    """Times with cores to itself: the simulator slows what shares them, by communication too."""
    overlap = model.sync.overlap
    return StageTimes(
        forward_s=model.forward_s,
        backward_s=model.backward_s,
        send_s=costs.send_s,
        back_s=costs.back_s,
        is_silent=costs.is_silent,
        saved_bytes=costs.cost.saved_bytes + costs.border_bytes,
        processes=costs.processes,
        programs=model.programs,
        overlap=Overlap(channel=overlap.channel) if slow > 1.0 else overlap,
        together=beside,
        blocks=style.blocking_sends,
    )


def _ending(
    models: Sequence[StageModel], tied_s: Sequence[float], norm_s: float | None, slow: float
) -> Ending:
    """Of a pipeline rank with these stages; all ranks are at it at once. `norm_s`: summing the
    norm of gradients over all ranks, if they are clipped."""
    finish = [step for model in models for step in model.finish]
    publish = [step for model in models for step in model.publish]
    hidden = [talk(model.hidden_s, "gather") for model in models]
    return Ending(
        finish=slowed(finish, slow),
        tied_s=sum(tied_s),
        optimizer_s=sum(model.optimizer.seconds for model in models) * slow,
        # Processes that share cores hide nothing from each other.
        publish=slowed((*in_turn(publish), *hidden) if slow > 1.0 else publish, slow),
        overlap=models[0].sync.overlap,
        clip_s=0.0 if norm_s is None else norm_s + sum(m.clip_s for m in models) * slow,
    )


def _beside_s(
    tables: CostTables, plan: Plan, costs: Sequence[StageCosts], models: Sequence[StageModel]
) -> float:
    """Of a step, what is not in its schedule: the runtime itself, and totals of the batch."""
    own_s = models[0].sync.overheads.step_s * slowdown(tables.cluster)
    return own_s + _totals_s(tables, plan, costs)


def _lagging(
    ending: Ending, syncs: Sequence[Sync], plan: Plan, step_s: float, slow: float
) -> Ending:
    """With what steps of `step_s` do not hide of messages that are waited for in later ones."""
    shown_s = sum([lagging_s(sync) for sync in syncs])
    if slow <= 1.0:  # processes that share cores hide nothing from each other
        shown_s = unhidden_s(syncs, plan.num_microbatches, step_s)
    return replace(ending, publish=(*ending.publish, talk(shown_s, "gather")))


def _talking(models: Sequence[StageModel], slow: float) -> float:
    """Share of a core that a process needs to communicate, where cores are shared.

    It was measured with all of them computing and communicating: what computing lost by that is
    what communicating took of the cores.
    """
    if slow <= 1.0:
        return 0.0
    measured = max(model.sync.overlap.compute for model in models)
    return measured - 1.0 if measured > 1.0 else TALKING


def _meeting_s(tables: CostTables, plan: Plan) -> float:
    """One number is summed over all ranks, such as the loss of a step; over those of a replica
    where the others hear of it later."""
    replicas = lone_replicas(plan)
    lines = [sorted({rank for stage in plan.stages for rank in stage.devices})]
    if replicas is not None:
        lines = [list(line) for line in replicas.lines]
    return max([collective_time(Primitive.ALL_REDUCE, 8, tables.levels(line)) for line in lines])


def _totals_s(tables: CostTables, plan: Plan, costs: Sequence[StageCosts]) -> float:
    """Totals of the batch that the prelude needs before the first forward, such as the number of
    valid tokens: their summands over all micro-batches, then a sum over data parallel ranks, or
    over those of a replica that trains alone."""
    layout = next((x for x in plan.layouts if x.pattern == PRELUDE), None)
    if layout is None:
        return 0.0
    found = sum(_is_total(ops) for ops in layout.ops.values())
    if not found:
        return 0.0
    last = costs[-1]
    axis = "dp_shard" if exchange_of(plan.stages[-1]).apart else "dp"
    levels = tables.levels(axis_ranks(plan.stages[-1], axis))
    again = plan.num_microbatches * len(layout.ops) * last.device.overhead_s
    return again + found * collective_time(Primitive.ALL_REDUCE, 8, levels)


def _is_total(ops: Mapping[str, str]) -> bool:
    return "dp" in ops and isinstance(parse_strategy(ops["dp"]).outputs[0], Partial)


def _prediction(
    tables: CostTables,
    plan: Plan,
    costs: Sequence[StageCosts],
    models: Sequence[StageModel],
    times: Sequence[StageTimes],
    stepped: StepTimes,
    slow: float,
) -> Prediction:
    extra = _beside_s(tables, plan, costs, models)
    parts = breakdown(stepped, times, extra)
    owners = by_stage(stepped.timeline.table.owners)
    step_s = stepped.step_s + extra
    return Prediction(
        step_s=step_s,
        samples_per_s=plan.global_batch_size / step_s,
        error_band=error_band(parts, bands_of(costs, models, owners[parts.rank]))
        * _narrower(tables),
        source=worst_source([cost.cost.source for cost in costs]),
        stages=_stages(tables, plan, costs, models, stepped, slow),
        breakdown=parts,
    )


def _narrower(tables: CostTables) -> float:
    """What whole runs of the stack say of bands, where no profile says more; experts were not in
    them."""
    mixes = EXPERTS_TARGET in tables.graph.targets
    return tables.run_as.band if tables.profile is None and not mixes else 1.0


def _stages(
    tables: CostTables,
    plan: Plan,
    costs: Sequence[StageCosts],
    models: Sequence[StageModel],
    stepped: StepTimes,
    slow: float,
) -> tuple[StagePrediction, ...]:
    table = stepped.timeline.table
    memories = rank_memories(tables, plan, table, costs, models)
    return tuple(
        StagePrediction(
            forward_s=model.forward_s,
            backward_s=model.backward_s,
            send_s=cost.send_s,
            sync_s=stepped.ended[rank].gradients_s + stepped.ended[rank].publish_s,
            optimizer_s=model.optimizer.seconds * slow,
            memory=memories[rank],
            hidden_s=model.hidden_s if slow == 1.0 else 0.0,
        )
        for cost, model, rank in zip(costs, models, table.owners, strict=True)
    )


def bands_of(
    costs: Sequence[StageCosts], models: Sequence[StageModel], own: Sequence[int]
) -> Bands:
    """Relative errors to expect of a pipeline rank with these stages."""
    seconds = sum(costs[i].cost.forward_s + costs[i].cost.backward_s for i in own)
    uncertain = sum(models[i].uncertain_s for i in own)
    first = models[own[0]].sync
    return Bands(
        compute=uncertain / seconds if seconds else 0.0,
        gradients=max(
            _band(group.lines.levels(group.exchange.axis), first.trained_bytes)
            for group in first.groups
        ),
        gather=max(_band(group.lines.shard, first.trained_bytes) for group in first.groups),
        optimizer=max(models[i].optimizer.band for i in own),
    )


def _band(levels: Levels, nbytes: float) -> float:
    return collective_band(levels, nbytes)
