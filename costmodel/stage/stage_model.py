"""One stage of a plan on its devices: what its actions do, what ends its step, what it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.block.overlap import NOTHING
from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.memory import training_state
from meshwright.costmodel.memory.stage_memory import BlockMemory, MemoryGroup, StageMemory
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
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.late import late_of
from meshwright.costmodel.stage.offload import arriving_s, copy_s, leaving_s
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.program import IDLE, Program, Step, play, talk
from meshwright.costmodel.stage.sync import BlockTimes, Sync
from meshwright.forms.exchange import Exchange
from meshwright.forms.sync import exchange_of
from meshwright.ir.graph.graph import Kind
from meshwright.ir.plan.parameters import groups_of
from meshwright.ir.plan.plan import FormChoice, Plan, Stage


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


def stage_model(tables: CostTables, plan: Plan, index: int, costs: StageCosts) -> StageModel:
    """The model of stage `index`; equal stages share one."""
    stage = plan.stages[index]
    parts = _parts(tables, stage, costs)
    key = (
        id(costs.cost), parts, stage.prefetch, stage.dp, stage.mesh.get("dp_shard", 1),
        plan.optimizer, costs.spot, costs.shard_levels, costs.replicate_levels,
        costs.border_bytes, costs.entry_bytes, costs.passage, costs.hidden,
        costs.packs, costs.updates,
    )  # fmt: skip
    found = tables.models.get(key)
    if found is None:
        found = tables.models[key] = _make(tables, plan.optimizer, stage, costs, parts)
    assert isinstance(found, StageModel)
    return found


_Parts = tuple[tuple[Exchange, frozenset[str] | None], ...]
"""What is done with parameters of a stage, and their names; None: all that it has."""


def _parts(tables: CostTables, stage: Stage, costs: StageCosts) -> _Parts:
    if not stage.by_parameter:
        return ((exchange_of(stage), None),)
    names: dict[str, list[str]] = {}
    for name in costs.cost.params:
        names.setdefault(tables.graph.tensors[name].fqn, []).append(name)
    return tuple(
        (exchange_of(view), frozenset(name for path in paths for name in names[path]))
        for view, paths in groups_of(stage, names)
    )


def _make(
    tables: CostTables, optimizer: str, stage: Stage, costs: StageCosts, parts: _Parts
) -> StageModel:
    held = [_held(tables, costs, names) for _, names in parts]
    sync = _sync(tables, stage, costs, parts, held)
    own = _trained(held, sync)
    actions = _actions(tables, sync, costs.device.name)
    return StageModel(
        sync=sync,
        programs=actions.programs,
        forward_s=actions.forward_s,
        backward_s=actions.backward_s,
        finish=tuple(sync.finish(_summed(costs, parts))),
        optimizer=optimizer_time(costs.device, optimizer, *own, tables.profile),
        clip_s=clip_time(costs.device, *own, scales=not costs.updates),
        publish=actions.publish,
        hidden_s=actions.hidden_s,
        memory=_memory(tables, optimizer, costs, parts, held, sync),
        uncertain_s=costs.cost.uncertain_s
        + costs.passage.uncertain_s
        + sum(one.uncertain_s for one in costs.hidden),
    )


def _actions(tables: CostTables, sync: Sync, device: str) -> _Actions:
    """What the stage does; that of other blocks with equal costs is the same."""
    key = (
        device, sync.groups, sync.prefetch, sync.shard, sync.blocks, sync.prelude_s,
        sync.dp, sync.shard_levels, sync.replicate_levels, sync.passage_forward_s,
        sync.passage_backward_s, sync.tensor_overlapped, sync.packs, sync.updates,
    )  # fmt: skip
    found = tables.models.get(key)
    if found is None:
        programs, late = sync.programs(), late_of(sync)
        found = tables.models[key] = _Actions(
            programs,
            play(programs[F].steps, IDLE, sync.overlap)[0],
            play(programs[B].steps, IDLE, sync.overlap)[0],
            (*sync.publish(), *([talk(late.exposed_s, "gather")] if late.exposed_s else [])),
            late.hidden_s,
        )
    assert isinstance(found, _Actions)
    return found


def _summed(costs: StageCosts, parts: _Parts) -> tuple[tuple[tuple[int, ...], Levels], ...]:
    """Bytes of the gradients that are summed over each model axis, group by group, and the links of
    the axis."""
    params, over = costs.cost.params, costs.cost.summed_over
    lines = zip(costs.spot.model, costs.spot.model_levels, strict=True)
    return tuple(
        (
            tuple(
                sum([
                    params[name] for name, axes in over.items()
                    if axis in axes and (names is None or name in names)
                ])
                for _, names in parts
            ),
            levels,
        )
        for (axis, _), levels in lines
    )  # fmt: skip


def _held(tables: CostTables, costs: StageCosts, names: frozenset[str] | None) -> BlockParams:
    """The stage's parameters of a group on one rank."""
    owners, sizes = _shared(tables, costs)
    owned: list[Owned] = []
    also: dict[int, frozenset[int]] = {}
    for index, (block, cost) in enumerate(zip(costs.blocks, costs.cost.blocks, strict=True)):
        held = cost.param_bytes
        kinds = tables.param_kinds[block.name]
        if names is not None:
            kinds = tuple(
                kind if name in names else None
                for name, kind in zip(block.params, kinds, strict=True)
            )
        if owners and not owners.keys().isdisjoint(block.params):
            read = [name for name in block.params if names is None or name in names]
            others = {owners.get(name, index) for name in read} - {index}
            also |= {index: frozenset(others)} if others else {}
            held = tuple(sizes.get(n, size) for n, size in zip(block.params, held, strict=True))
            kinds = tuple(
                kind if owners.get(name, index) == index else None
                for name, kind in zip(block.params, kinds, strict=True)
            )
        key = kinds, held
        if key not in tables.owned:
            tables.owned[key] = Owned.of(
                [LocalParam(size, *kind) for size, kind in zip(held, kinds, strict=True) if kind]
            )
        owned.append(tables.owned[key])
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
        self.tables, self.stage, self.costs = tables, stage, costs
        self._held: dict[frozenset[str] | None, BlockParams] = {}
        self._sync: Sync | None = None

    def waited_s(self, choice: FormChoice) -> float:
        """Seconds from the start of the stage's last backward to the next step, with what makes
        that longer; the update left out. What the stage says of single parameters stays."""
        tables, costs = self.tables, self.costs
        stage = replace(self.stage, sync=choice)
        parts = _parts(tables, stage, costs)
        for _, names in parts:
            if names not in self._held:
                self._held[names] = _held(tables, costs, names)
        held = [self._held[names] for _, names in parts]
        if self._sync is None:
            self._sync = _sync(tables, stage, costs, parts, held)
        sync = replace(self._sync, groups=_groups(tables, stage, parts, held))
        last = sync.programs()[B + LAST].steps
        steps = (*last, *sync.finish(_summed(costs, parts)), *sync.publish())
        return play(steps, IDLE, sync.overlap)[0] + late_of(sync).exposed_s


def _groups(
    tables: CostTables, stage: Stage, parts: _Parts, held: Sequence[BlockParams]
) -> tuple[FormGroup, ...]:
    return tuple(
        FormGroup(
            exchange,
            _buckets(tables, stage, exchange, own),
            tuple(own.gathered),
            tuple([o.trained_bytes for o in own.owned]) if len(parts) > 1 else (),
        )
        for (exchange, _), own in zip(parts, held, strict=True)
    )


def _buckets(
    tables: CostTables, stage: Stage, exchange: Exchange, held: BlockParams
) -> tuple[Bucket, ...]:
    limit_bytes = exchange.bucket_bytes or (0 if exchange.reduces_blocks else tables.bucket_bytes)
    made = forward_buckets if exchange.in_forward_order else buckets
    return () if stage.dp == 1 else made(held.owned, limit_bytes)


def _sync(
    tables: CostTables,
    stage: Stage,
    costs: StageCosts,
    parts: _Parts,
    held: Sequence[BlockParams],
) -> Sync:
    return Sync(
        groups=_groups(tables, stage, parts, held),
        prefetch=stage.prefetch, shard=stage.mesh.get("dp_shard", 1),
        blocks=_block_times(tables, costs),
        prelude_s=costs.cost.forward_s - sum([c.forward_s for c in costs.cost.blocks]),
        dp=costs.spot.dp_levels, shard_levels=costs.shard_levels,
        replicate_levels=costs.replicate_levels, overheads=overheads_of(costs.device),
        passage_forward_s=costs.passage.forward_s, passage_backward_s=costs.passage.backward_s,
        packs=costs.packs, updates=costs.updates, side_by_side=costs.device.kind == "cpu",
    )  # fmt: skip


def _block_times(tables: CostTables, costs: StageCosts) -> tuple[BlockTimes, ...]:
    """Of each block; those that are alike share one object."""
    overheads = overheads_of(costs.device)
    rows = zip(
        costs.cost.blocks,
        costs.hidden or (NOTHING,) * len(costs.blocks),
        [mode is True for mode in costs.modes],
        *_copy_waits(tables, costs),
        strict=True,
    )
    known: dict[object, BlockTimes] = {}
    found: list[BlockTimes] = []
    for cost, hidden, again, leaves_s, returns_s in rows:
        key = id(cost), id(hidden), again, leaves_s, returns_s
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


def _trained(held: Sequence[BlockParams], sync: Sync) -> tuple[int, int]:
    """Tensors that the optimizer steps over, and the bytes of this rank's part of them."""
    tensors = sum([group.tensors for group in held])
    return tensors, sum([
        ceil(group.trained_bytes / form.exchange.parts("optimizer", sync.shard))
        for group, form in zip(held, sync.groups, strict=True)
    ])  # fmt: skip


def _memory(
    tables: CostTables,
    optimizer: str,
    costs: StageCosts,
    parts: _Parts,
    held: Sequence[BlockParams],
    sync: Sync,
) -> StageMemory:
    shares = [form.exchange.parts("optimizer", sync.shard) for form in sync.groups]
    trained = [own.trained_bytes for own in held]
    others = sum(costs.cost.params.values()) - sum(trained)
    states = [
        training_state(
            nbytes, nbytes, optimizer=optimizer, exchange=form.exchange, dp_shard=sync.shard
        )
        for nbytes, form in zip(trained, sync.groups, strict=True)
    ]
    return StageMemory(
        shard=sync.shard, prefetch=sync.prefetch, receives=costs.device.kind == "cpu",
        parameters=others + sum([state.parameters_bytes for state in states]),
        optimizer=sum([state.optimizer_bytes for state in states]),
        temporary=temporary_bytes(
            costs.device, optimizer,
            sum([nbytes // parts for nbytes, parts in zip(trained, shares, strict=True)]),
            max([own.largest for group in held for own in group.owned]),
        ),
        summed=max([
            sum([nbytes // parts for nbytes, parts in zip(sizes, shares, strict=True)])
            for sizes, _ in _summed(costs, parts)
        ], default=0),
        border=costs.border_bytes, entry=costs.entry_bytes,
        blocks=_block_memories(costs),
        groups=tuple(
            MemoryGroup(
                form.exchange, form.buckets or buckets(own.owned, 0), form.gathered,
                tuple([o.trained_bytes for o in own.owned]),
                tuple([o.largest_trained for o in own.owned]),
            )
            for form, own in zip(sync.groups, held, strict=True)
        ),
    )  # fmt: skip


def _block_memories(costs: StageCosts) -> tuple[BlockMemory, ...]:
    """Of each block; those that are alike share one object."""
    on_device = costs.device.kind != "cpu"
    known: dict[object, BlockMemory] = {}
    found: list[BlockMemory] = []
    before = 0
    for cost, saved in zip(costs.cost.blocks, costs.cost.block_saved, strict=True):
        key = id(cost), saved, before
        moved = cost.moved_bytes * on_device
        if key not in known:
            known[key] = BlockMemory(
                saved=saved,
                # Part of an op's operands and results is what it saves. What is offloaded is there
                # while its block runs, and while the next one does.
                forward=max(saved + moved, cost.workspace_bytes) + before,
                workspace=cost.workspace_bytes + cost.remade_bytes + moved + before,
                halved=cost.halved_bytes,
            )
        found.append(known[key])
        before = moved
    return tuple(found)
