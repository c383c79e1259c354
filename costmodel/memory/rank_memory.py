"""The predicted peak of each pipeline rank: what its stages hold, what the process does."""

from collections import Counter
from collections.abc import Sequence

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.fragmentation import fragmentation_of
from meshwright.costmodel.memory.memory_timeline import (
    held_stages,
    held_then,
    largest,
    most_under_way,
    of_each_kind,
    stays,
)
from meshwright.costmodel.memory.stack_bytes import late_bytes
from meshwright.costmodel.simulate.compiled_schedule import Table
from meshwright.costmodel.stage.placement import StageCosts, axis_ranks
from meshwright.costmodel.stage.stage_model import StageModel
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.plan.lines import border_pairs
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import RankMemory


def rank_memories(
    tables: CostTables,
    plan: Plan,
    table: Table,
    costs: Sequence[StageCosts],
    models: Sequence[StageModel],
) -> tuple[RankMemory, ...]:
    """Per pipeline rank; the rank with most on the devices of each."""
    return tuple(
        _rank_memory(tables, plan, table, rank, costs, models) for rank in range(len(table.rows))
    )


def _rank_memory(
    tables: CostTables,
    plan: Plan,
    table: Table,
    rank: int,
    costs: Sequence[StageCosts],
    models: Sequence[StageModel],
) -> RankMemory:
    own = held_stages(table, rank)
    memories = [model.memory for model in models]
    moments = held_then(table, rank, memories)
    held = expected = largest(moments)
    on_time = [memory.expected for memory in memories]
    if any(after is not before for after, before in zip(on_time, memories, strict=True)):
        expected = largest(held_then(table, rank, on_time))
    device = costs[own[0]].device
    on_host = device.kind == "cpu"
    parameters = sum(models[i].memory.parameters for i in own)
    optimizer = sum(models[i].memory.optimizer for i in own)
    holes = fragmentation_of(device, tables.profile, tables.graph.fingerprint)
    moving = held.activations + held.communication + held.workspace
    beyond = holes.moving * moving
    if on_host or holes.gradients:
        kinds = of_each_kind(moments)
        staying = sum(models[i].memory.always.gradients for i in own)
        staying += sum(stays(memories[i], table, i).gradients for i in own)
        beyond += holes.gradients * (kinds.gradients - staying)
    if on_host:
        # Flat tensors and activations differ in size: a heap that one kind has grown does not
        # serve the other.
        first = plan.num_microbatches == 1
        sent = max(memories[i].most_sent_bytes(first) for i in own)
        sent += most_under_way(table, rank, memories)
        beyond += max(sent, kinds.communication) - held.communication
        beyond += max(0, kinds.activations - held.activations)
    inputs = _inputs_bytes(tables.graph, plan, [costs[i] for i in own], on_host)
    process = _process_bytes(tables, plan, device, own)
    habits = tables.run_as.memory
    logits = max([block.logits for i in own for block in costs[i].cost.blocks], default=0)
    outputs = 0
    if len(table.rows) > 1:
        outputs = habits.kept_output_bytes * logits * plan.num_microbatches
    if not on_host:
        allocated = parameters + held.gradients + optimizer + moving + inputs + outputs
        beyond += habits.reserved * allocated
        # An allocator gives back what is reserved apart when memory is short.
        apart = sum(models[i].memory.stack.apart for i in own)
        apart += habits.loss_hole_bytes * logits * (not outputs)
        if plan.num_microbatches == 1:  # else those of the micro-batch before are there
            apart += sum(models[i].memory.stack.gradients_apart for i in own)
        apart += late_bytes(
            habits.late, [b for i in own for b in costs[i].cost.blocks],
            len(table.rows), plan.num_microbatches,
        )  # fmt: skip
        spare = device.memory_bytes - process - allocated - beyond
        beyond += max(0.0, min(apart, spare))
    return RankMemory(
        parameters_bytes=parameters,
        gradients_bytes=expected.gradients,
        optimizer_bytes=optimizer,
        activations_bytes=expected.activations + outputs,
        communication_bytes=expected.communication,
        workspace_bytes=expected.workspace,
        inputs_bytes=inputs,
        fragmentation_bytes=round(beyond),
        late_copies_bytes=held.total - expected.total,
        process_bytes=process,
        host_bytes=sum(models[i].memory.host for i in own),
    )


def _process_bytes(tables: CostTables, plan: Plan, device: DeviceType, own: Sequence[int]) -> int:
    """The process and its communicators; on a CPU the user's module, which stays beside the job's
    own parameters. 0 where nobody measured what a bare process holds."""
    known = {name: r.value for name, r in tables.profile.memory.items()} if tables.profile else {}
    process = known.get("process", device.reserved_bytes)
    if not process:
        return 0
    if len(plan.stages) > 1 or len(plan.stages[0].devices) > 1:
        process += known.get("process_group", 0.0)
        process += known["group"] * _groups(plan, own) if "group" in known else 0.0
    return round(process) + (_module_bytes(tables.graph) if device.kind == "cpu" else 0)


def _groups(plan: Plan, own: Sequence[int]) -> int:
    """Process groups of a rank besides that of the whole job (`runtime.world.groups`)."""
    lines: set[tuple[int, ...]] = set()
    for index in own:
        stage = plan.stages[index]
        lines |= {axis_ranks(stage, axis) for axis in ("dp", *stage.mesh)}
    devices = {rank for index in own for rank in plan.stages[index].devices}
    found = Counter(rank for pair in border_pairs(plan) for rank in pair if rank in devices)
    return sum(len(line) > 1 for line in lines) + max(found.values(), default=0)


def _inputs_bytes(graph: Graph, plan: Plan, own: Sequence[StageCosts], on_host: bool) -> int:
    """On a CPU the whole batch as every rank is given it, else what the rank reads of it."""
    whole = sum(graph.tensors[name].nbytes for name in graph.inputs)
    if on_host:
        return whole
    inputs = set(graph.inputs)
    if not any(not inputs.isdisjoint(b.inputs) for cost in own for b in cost.blocks):
        return 0
    return round(whole * max(c.spot.samples for c in own) / plan.samples_per_microbatch)


def _module_bytes(graph: Graph) -> int:
    kinds = (Kind.PARAMETER, Kind.BUFFER)
    return sum(t.nbytes for t in graph.tensors.values() if t.kind in kinds)
