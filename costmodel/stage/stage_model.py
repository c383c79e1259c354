"""One stage of a plan on its devices: what its actions do, what ends its step, what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.block.overlap import NOTHING
from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.memory import training_state
from meshwright.costmodel.memory.stage_memory import BlockMemory, StageMemory
from meshwright.costmodel.ops.clip import clip_time
from meshwright.costmodel.ops.optimizer import OptimizerTime, optimizer_time, temporary_bytes
from meshwright.costmodel.ops.overheads import overheads_of
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F
from meshwright.costmodel.stage.buckets import (
    BlockParams,
    Bucket,
    LocalParam,
    Owned,
    buckets,
    forward_buckets,
)
from meshwright.costmodel.stage.late import late_of
from meshwright.costmodel.stage.offload import arriving_s, copy_s, leaving_s
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.program import IDLE, Program, Step, play, talk
from meshwright.costmodel.stage.sync import BlockTimes, Sync
from meshwright.forms.sync import exchange_of
from meshwright.ir.graph.graph import Kind
from meshwright.ir.memo import Memo
from meshwright.ir.plan.plan import Plan, Stage, SyncChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """What estimates need of a stage; depends on the stage alone."""

    sync: Sync
    programs: Mapping[int, Program]
    forward_s: float
    backward_s: float
    """Of one micro-batch that is not the last."""
    finish: tuple[Step, ...]
    """Until gradients are complete."""
    optimizer: OptimizerTime
    clip_s: float
    """Clipping gradients, but for the sum of their norms over ranks."""
    publish: tuple[Step, ...]
    """From the optimizer's step to the next forward, with what makes that longer."""
    hidden_s: float
    """Of what goes under the next step's first forward, what that hides."""
    memory: StageMemory
    uncertain_s: float
    """Of one micro-batch: seconds times relative error."""


class _Actions(NamedTuple):
    """The part that depends on how a stage synchronises."""

    programs: Mapping[int, Program]
    forward_s: float
    backward_s: float
    publish: tuple[Step, ...]
    hidden_s: float


_models: Memo[tuple[object, ...], StageModel] = Memo()
_acted: Memo[tuple[object, ...], _Actions] = Memo()
_owned: Memo[tuple[object, ...], Owned] = Memo()


def stage_model(tables: CostTables, plan: Plan, index: int, costs: StageCosts) -> StageModel:
    """The model of stage `index`; equal stages share one."""
    stage = plan.stages[index]
    key = (
        id(costs.cost), exchange_of(stage), stage.prefetch, stage.dp, stage.mesh.get("dp_shard", 1),
        plan.optimizer, costs.spot, costs.shard_levels, costs.replicate_levels,
        costs.border_bytes, costs.entry_bytes, costs.passage, costs.hidden,
        costs.packs, costs.updates,
    )  # fmt: skip
    known = _models.of(tables)
    if key not in known:
        known[key] = _make(tables, plan.optimizer, stage, costs)
    return known[key]


def _make(tables: CostTables, optimizer: str, stage: Stage, costs: StageCosts) -> StageModel:
    held = _held(tables, costs)
    sync = _sync(tables, stage, costs, held)
    own = _trained(held, sync)
    actions = _actions(tables, sync, costs.device.name)
    return StageModel(
        sync=sync,
        programs=actions.programs,
        forward_s=actions.forward_s,
        backward_s=actions.backward_s,
        finish=tuple(sync.finish(_summed(costs))),
        optimizer=optimizer_time(costs.device, optimizer, *own, tables.profile),
        clip_s=clip_time(costs.device, *own, scales=not costs.updates),
        publish=actions.publish,
        hidden_s=actions.hidden_s,
        memory=_memory(tables, optimizer, costs, held, sync),
        uncertain_s=costs.cost.uncertain_s
        + costs.passage.uncertain_s
        + sum(one.uncertain_s for one in costs.hidden),
    )


def _actions(tables: CostTables, sync: Sync, device: str) -> _Actions:
    """What the stage does; that of other blocks with equal costs is the same."""
    key = (
        device, sync.exchange, sync.prefetch, sync.shard, sync.blocks, sync.buckets, sync.prelude_s,
        sync.dp, sync.shard_levels, sync.replicate_levels, sync.passage_forward_s,
        sync.passage_backward_s, sync.tensor_overlapped, sync.packs, sync.updates,
    )  # fmt: skip
    known = _acted.of(tables)
    if key not in known:
        programs, late = sync.programs(), late_of(sync)
        known[key] = _Actions(
            programs,
            play(programs[F].steps, IDLE, sync.overlap)[0],
            play(programs[B].steps, IDLE, sync.overlap)[0],
            (*sync.publish(), *([talk(late.exposed_s, "gather")] if late.exposed_s else [])),
            late.hidden_s,
        )
    return known[key]


def _summed(costs: StageCosts) -> tuple[tuple[int, Levels], ...]:
    """Bytes of the gradients that are summed over each model axis, and the links of the axis."""
    params, over = costs.cost.params, costs.cost.summed_over
    lines = zip(costs.spot.model, costs.spot.model_levels, strict=True)
    return tuple(
        (sum([params[name] for name, axes in over.items() if axis in axes]), levels)
        for (axis, _), levels in lines
    )


def _held(tables: CostTables, costs: StageCosts) -> BlockParams:
    """The stage's parameters on one rank."""
    owners, sizes = _shared(tables, costs)
    known = _owned.of(tables)
    owned: list[Owned] = []
    also: dict[int, frozenset[int]] = {}
    for index, (block, cost) in enumerate(zip(costs.blocks, costs.cost.blocks, strict=True)):
        held = cost.param_bytes
        kinds = tables.param_kinds[block.name]
        if owners and not owners.keys().isdisjoint(block.params):
            others = {owners.get(name, index) for name in block.params} - {index}
            also |= {index: frozenset(others)} if others else {}
            held = tuple(sizes.get(n, size) for n, size in zip(block.params, held, strict=True))
            kinds = tuple(
                kind if owners.get(name, index) == index else None
                for name, kind in zip(block.params, kinds, strict=True)
            )
        key = kinds, held
        if key not in known:
            known[key] = Owned.of(
                [LocalParam(size, *kind) for size, kind in zip(held, kinds, strict=True) if kind]
            )
        owned.append(known[key])
    return BlockParams(tuple(owned), also)


def _shared(tables: CostTables, costs: StageCosts) -> tuple[dict[str, int], dict[str, int]]:
    """Of parameters that several blocks of the model read, and some of the stage: the first of
    these, and the bytes."""
    owners: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name in tables.shared:
        if name in costs.cost.params and tables.graph.tensors[name].kind is Kind.PARAMETER:
            users = [i for i, block in enumerate(costs.blocks) if name in block.params]
            last = users[-1]
            owners[name] = users[0]
            at = costs.blocks[last].params.index(name)
            sizes[name] = costs.cost.blocks[last].param_bytes[at]
    return owners, sizes


class SyncPrices:
    """What forms of synchronisation leave a stage to wait for; what they share is computed once."""

    def __init__(self, tables: CostTables, stage: Stage, costs: StageCosts) -> None:
        self.tables, self.stage = tables, stage
        self._held, self._summed = _held(tables, costs), _summed(costs)
        self._sync = _sync(tables, stage, costs, self._held)

    def waited_s(self, choice: SyncChoice) -> float:
        """Seconds from the start of the stage's last backward to the next step, with what makes
        that longer; the update left out."""
        stage = replace(self.stage, sync=choice)
        buckets = _buckets(self.tables, stage, self._held)
        sync = replace(self._sync, exchange=exchange_of(stage), buckets=buckets)
        last = sync.programs()[B + LAST].steps
        steps = (*last, *sync.finish(self._summed), *sync.publish())
        return play(steps, IDLE, sync.overlap)[0] + late_of(sync).exposed_s


def _buckets(tables: CostTables, stage: Stage, held: BlockParams) -> tuple[Bucket, ...]:
    exchange = exchange_of(stage)
    limit_bytes = exchange.bucket_bytes or (0 if exchange.reduces_blocks else tables.bucket_bytes)
    made = forward_buckets if exchange.in_forward_order else buckets
    return () if stage.dp == 1 else made(held.owned, limit_bytes)


def _sync(tables: CostTables, stage: Stage, costs: StageCosts, held: BlockParams) -> Sync:
    return Sync(
        exchange=exchange_of(stage), prefetch=stage.prefetch, shard=stage.mesh.get("dp_shard", 1),
        blocks=_block_times(tables, costs, held), buckets=_buckets(tables, stage, held),
        prelude_s=costs.cost.forward_s - sum([c.forward_s for c in costs.cost.blocks]),
        dp=costs.spot.dp_levels, shard_levels=costs.shard_levels,
        replicate_levels=costs.replicate_levels, overheads=overheads_of(costs.device),
        passage_forward_s=costs.passage.forward_s, passage_backward_s=costs.passage.backward_s,
        packs=costs.packs, updates=costs.updates, side_by_side=costs.device.kind == "cpu",
    )  # fmt: skip


def _block_times(
    tables: CostTables, costs: StageCosts, held: BlockParams
) -> tuple[BlockTimes, ...]:
    """Of each block; those that are alike share one object."""
    overheads = overheads_of(costs.device)
    rows = zip(
        costs.cost.blocks,
        costs.hidden or (NOTHING,) * len(costs.blocks),
        [mode is True for mode in costs.modes],
        held.gathered,
        *_copy_waits(tables, costs),
        strict=True,
    )
    known: dict[object, BlockTimes] = {}
    found: list[BlockTimes] = []
    for cost, hidden, again, gathered, leaves_s, returns_s in rows:
        key = id(cost), id(hidden), again, gathered, leaves_s, returns_s
        if key not in known:
            known[key] = BlockTimes(
                forward_s=cost.forward_s - cost.comm_forward_s + hidden.more_forward_s,
                tensor_forward_s=cost.comm_forward_s - hidden.forward_s,
                again_s=cost.again_s + again * hidden.more_forward_s,
                input_s=cost.backward_input_s
                - cost.comm_backward_s
                - cost.again_s
                + hidden.more_backward_s,
                weight_s=cost.backward_weight_s,
                accumulate_s=cost.accumulate_s,
                split_s=cost.split_s,
                tensor_backward_s=cost.comm_backward_s
                - hidden.backward_s
                - again * hidden.remade_s,
                gathered_bytes=gathered,
                overhead_s=overheads.block_of(cost.no_grad_s is not None),
                leaves_s=leaves_s,
                returns_s=returns_s,
            )
        found.append(known[key])
    return tuple(found)


def _copy_waits(tables: CostTables, costs: StageCosts) -> tuple[list[float], list[float]]:
    """Per block, what its offloaded values keep it waiting for after its forward and before its
    backward."""
    blocks = costs.cost.blocks
    known = {
        nbytes: copy_s(costs.device, nbytes, tables.profile)
        for nbytes in {cost.moved_bytes for cost in blocks}
    }
    copies = [known[cost.moved_bytes] for cost in blocks]
    if costs.device.kind == "cpu" or not any(copies):
        return copies, copies
    back = arriving_s([cost.backward_s for cost in reversed(blocks)], copies[::-1])
    return leaving_s([cost.forward_s for cost in blocks], copies), back[::-1]


def _trained(held: BlockParams, sync: Sync) -> tuple[int, int]:
    """Tensors that the optimizer steps over, and the bytes of this rank's part of them."""
    nbytes = sum([own.trained_bytes for own in held.owned])
    tensors = sum([own.tensors for own in held.owned])
    return tensors, ceil(nbytes / sync.exchange.parts("optimizer", sync.shard))


def _memory(
    tables: CostTables, optimizer: str, costs: StageCosts, held: BlockParams, sync: Sync
) -> StageMemory:
    trained = sum([own.trained_bytes for own in held.owned])
    parts = sync.exchange.parts("optimizer", sync.shard)
    state = training_state(
        sum(costs.cost.params.values()), trained,
        optimizer=optimizer, exchange=sync.exchange, dp_shard=sync.shard,
    )  # fmt: skip
    return StageMemory(
        exchange=sync.exchange, shard=sync.shard, prefetch=sync.prefetch,
        receives=costs.device.kind == "cpu",
        parameters=state.parameters_bytes, optimizer=state.optimizer_bytes,
        temporary=temporary_bytes(
            costs.device, optimizer, trained // parts, max([own.largest for own in held.owned])
        ),
        summed=max((nbytes // parts for nbytes, _ in _summed(costs)), default=0),
        border=costs.border_bytes, entry=costs.entry_bytes,
        blocks=_block_memories(costs, held),
        buckets=sync.buckets or buckets(held.owned, 0),
    )  # fmt: skip


def _block_memories(costs: StageCosts, held: BlockParams) -> tuple[BlockMemory, ...]:
    """Of each block; those that are alike share one object."""
    on_device = costs.device.kind != "cpu"
    rows = zip(costs.cost.blocks, costs.cost.block_saved, held.owned, held.gathered, strict=True)
    known: dict[object, BlockMemory] = {}
    found: list[BlockMemory] = []
    before = 0
    for cost, saved, own, gathered in rows:
        key = id(cost), saved, id(own), gathered, before
        moved = cost.moved_bytes * on_device
        if key not in known:
            known[key] = BlockMemory(
                saved=saved,
                # Part of an op's operands and results is what it saves. What is offloaded is there
                # while its block runs, and while the next one does.
                forward=max(saved + moved, cost.workspace_bytes) + before,
                workspace=cost.workspace_bytes + cost.remade_bytes + moved + before,
                parameters=gathered,
                gradients=own.trained_bytes,
                largest=own.largest_trained,
                halved=cost.halved_bytes,
            )
        found.append(known[key])
        before = moved
    return tuple(found)
