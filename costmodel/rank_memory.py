"""The predicted peak of each pipeline rank: what its stages hold, what the process does."""

from collections.abc import Sequence

from meshwright.costmodel.memory_timeline import held_stages, peak
from meshwright.costmodel.overheads import CPU_FRAGMENTATION
from meshwright.costmodel.placement import StageCosts
from meshwright.costmodel.stage_model import StageModel
from meshwright.costmodel.table import Table
from meshwright.costmodel.tables import CostTables
from meshwright.ir.device import DeviceType
from meshwright.ir.graph import Graph, Kind
from meshwright.ir.plan import Plan, RankMemory
from meshwright.ir.profile import Profile


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
    held = peak(table, rank, [model.memory for model in models])
    device = costs[own[0]].device
    on_host = device.kind == "cpu"
    moving = held.activations + held.communication + held.workspace
    return RankMemory(
        parameters_bytes=sum(models[i].memory.parameters for i in own),
        gradients_bytes=held.gradients,
        optimizer_bytes=sum(models[i].memory.optimizer for i in own),
        activations_bytes=held.activations,
        communication_bytes=held.communication,
        workspace_bytes=held.workspace,
        inputs_bytes=_inputs_bytes(tables.graph, plan, [costs[i] for i in own], on_host),
        fragmentation_bytes=round(fragmentation(device, tables.profile) * moving),
        process_bytes=_process_bytes(tables, device, plan.world_size),
    )


def fragmentation(device: DeviceType, profile: Profile | None) -> float:
    """What the allocator holds beyond the tensors that come and go in a step, relative to them."""
    record = profile.memory.get("fragmentation") if profile else None
    if record is not None:
        return record.value
    return CPU_FRAGMENTATION if device.kind == "cpu" else 0.0


def _process_bytes(tables: CostTables, device: DeviceType, ranks: int) -> int:
    """The process and its communicators; on a CPU the user's module, which stays beside the job's
    own parameters."""
    known = tables.profile.memory if tables.profile else {}
    process = known["process"].value if "process" in known else device.reserved_bytes
    if ranks > 1 and "process_group" in known:
        process += known["process_group"].value
    return round(process) + (_module_bytes(tables.graph) if device.kind == "cpu" else 0)


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
