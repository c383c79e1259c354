"""One stage of a plan on its devices: what its actions do, what ends its step, what it holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.block.overlap import NOTHING
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.stage_memory import StageMemory
from meshwright.costmodel.ops.clip import clip_time
from meshwright.costmodel.ops.compute import rows_left_out_s, worst_source
from meshwright.costmodel.ops.optimizer import (
    OptimizerTime,
    casting_s,
    optimizer_time,
    products_s,
)
from meshwright.costmodel.ops.overheads import overheads_of
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F
from meshwright.costmodel.stage.buckets import (
    BlockParams,
    Bucket,
    buckets,
    forward_buckets,
)
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.host import copy_waits, waits_of_step, ways_of
from meshwright.costmodel.stage.landings import landings_of
from meshwright.costmodel.stage.late import Late, late_of
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.program import IDLE, Program, Step, play, run, talk
from meshwright.costmodel.stage.stage_holding import stage_memory_of
from meshwright.costmodel.stage.stage_parts import Part, Parts, Summed, held_of, parts_of, summed_of
from meshwright.costmodel.stage.sync import Sync
from meshwright.costmodel.stage.times import BlockTimes
from meshwright.forms.updates import update
from meshwright.ir.cluster.device import HostShare
from meshwright.ir.memo import Memo
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
    summed: Summed
    """Gradients that are summed over model axes that are not folded for them."""
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


def stage_model(tables: CostTables, plan: Plan, index: int, costs: StageCosts) -> StageModel:
    """The model of stage `index`; equal stages share one."""
    stage = plan.stages[index]
    parts = parts_of(tables, stage, costs, plan.optimizer)
    key = (
        id(costs.cost), parts, stage.prefetch, costs.spot,
        costs.border_bytes, costs.entry_bytes, costs.passage, costs.hidden,
        costs.border_back_bytes, costs.entry_back_bytes,
        costs.handed_bytes, costs.taken_bytes, costs.shared_bytes,
        costs.packs, costs.updates, bool(costs.cuts),
    )  # fmt: skip
    known = _models.of(tables)
    if key not in known:
        known[key] = _make(tables, stage, costs, parts)
    return known[key]


def _make(tables: CostTables, stage: Stage, costs: StageCosts, parts: Parts) -> StageModel:
    held = [held_of(tables, costs, part.names) for part in parts]
    sync = _sync(tables, stage, costs, parts, held)
    own = _trained(held, sync)
    summed = summed_of(costs, parts)
    actions = _actions(tables, sync, costs.device.name)
    return StageModel(
        sync=sync,
        programs=actions.programs,
        forward_s=actions.forward_s,
        backward_s=actions.backward_s,
        finish=tuple(sync.finish(summed)),
        summed=summed,
        optimizer=_optimizer_time(tables, costs, parts, own),
        clip_s=clip_time(costs.device, *_total(own), scales=not costs.updates),
        publish=actions.publish,
        hidden_s=actions.hidden_s,
        memory=stage_memory_of(
            tables.run_as.memory,
            costs,
            parts,
            held,
            sync,
            ways_of(tables, costs, sync.groups, held, sync.blocks),
            landings_of(tables, costs, parts, stage.prefetch),
        ),
        uncertain_s=costs.cost.uncertain_s
        + costs.passage.uncertain_s
        + sum(one.uncertain_s for one in costs.hidden),
    )


def _actions(tables: CostTables, sync: Sync, device: str) -> _Actions:
    """What the stage does; that of other blocks with equal costs is the same."""
    key = (
        device, sync.groups, sync.prefetch, sync.blocks, sync.prelude_s, sync.passage_forward_s,
        sync.passage_backward_s, sync.tensor_overlapped, sync.packs, sync.updates, sync.host,
    )  # fmt: skip
    known = _acted.of(tables)
    if key not in known:
        programs, late = sync.programs(), late_of(sync)
        known[key] = _Actions(
            programs,
            play(programs[F].steps, IDLE, sync.overlap)[0],
            play(programs[B].steps, IDLE, sync.overlap)[0],
            (*sync.publish(), *_exposed(late)),
            late.hidden_s + sync.host.hidden_s,
        )
    return known[key]


def _exposed(late: Late) -> Iterator[Step]:
    """What the next forward does not hide, as if it came before that."""
    if late.exposed_s:
        yield run(late.copied_s, "gather")
        yield talk(late.exposed_s - late.copied_s, "gather")


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
        parts = parts_of(tables, stage, costs, "")
        for part in parts:
            if part.names not in self._held:
                self._held[part.names] = held_of(tables, costs, part.names)
        held = [self._held[part.names] for part in parts]
        if self._sync is None:
            self._sync = _sync(tables, stage, costs, parts, held)
        sync = replace(self._sync, groups=_groups(tables, costs, parts, held))
        last = sync.programs()[B + LAST].steps
        steps = (*last, *sync.finish(summed_of(costs, parts)), *sync.publish())
        return play(steps, IDLE, sync.overlap)[0] + late_of(sync).exposed_s


def _groups(
    tables: CostTables,
    costs: StageCosts,
    parts: Parts,
    held: Sequence[BlockParams],
) -> tuple[FormGroup, ...]:
    still = frozenset(i for i, block in enumerate(costs.blocks) if block.name in tables.still)
    return tuple(
        FormGroup(
            part.exchange,
            _buckets(tables, part, own),
            tuple(own.gathered),
            tuple(own.gathered_frozen) if own.frozen_bytes and part.exchange.fetches else (),
            still if part.exchange.fetches else frozenset(),
            tuple([o.trained_bytes for o in own.owned]) if len(parts) > 1 else (),
            part.lines,
            update(part.update).copies if part.update else 0,
        )
        for part, own in zip(parts, held, strict=True)
    )


def _buckets(tables: CostTables, part: Part, held: BlockParams) -> tuple[Bucket, ...]:
    exchange = part.exchange
    limit_bytes = exchange.bucket_bytes or (0 if exchange.reduces_blocks else tables.bucket_bytes)
    made = forward_buckets if exchange.in_forward_order else buckets
    return () if part.lines.ranks == 1 else made(held.owned, limit_bytes)


def _sync(
    tables: CostTables,
    stage: Stage,
    costs: StageCosts,
    parts: Parts,
    held: Sequence[BlockParams],
) -> Sync:
    groups = _groups(tables, costs, parts, held)
    blocks = _with_rows(_block_times(tables, costs, groups, stage.prefetch), groups, held, costs)
    return Sync(
        groups=groups,
        host=waits_of_step(tables, costs, groups, held, blocks),
        prefetch=stage.prefetch,
        blocks=blocks,
        prelude_s=costs.cost.forward_s - sum([c.forward_s for c in costs.cost.blocks]),
        overheads=overheads_of(costs.device),
        passage_forward_s=costs.passage.forward_s, passage_backward_s=costs.passage.backward_s,
        packs=costs.packs, updates=costs.updates, side_by_side=costs.device.kind == "cpu",
        check_s=costs.device.launching.check_s if costs.device.launching else 0.0,
        chain_hop_s=tables.run_as.chain_hop_s,
    )  # fmt: skip


def _block_times(
    tables: CostTables, costs: StageCosts, groups: Sequence[FormGroup], prefetch: int
) -> tuple[BlockTimes, ...]:
    """Of each block; those that are alike share one object."""
    overheads = overheads_of(costs.device)
    rows = zip(
        costs.cost.blocks,
        costs.hidden or (NOTHING,) * len(costs.blocks),
        [mode is True for mode in costs.modes],
        *copy_waits(tables, costs, groups, prefetch),
        strict=True,
    )
    known: dict[object, BlockTimes] = {}
    found: list[BlockTimes] = []
    for cost, hidden, again, leaves_s, returns_s, fetched_s in rows:
        key = id(cost), id(hidden), again, leaves_s, returns_s, fetched_s
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
                - again * hidden.remade_s * _run_again(cost),
                overhead_s=overheads.block_of(cost.no_grad_s is not None),
                leaves_s=leaves_s,
                returns_s=returns_s,
                fetched_s=fetched_s,
                beside_forward_s=hidden.between_forward_s,
                beside_backward_s=hidden.between_backward_s
                + again * (hidden.between_forward_s if hidden.remade_s > 0.0 else 0.0),
            )
        found.append(known[key])
    return tuple(found)


def _run_again(cost: BlockCost) -> float:
    """Share of a forward's collectives that run where it is made again."""
    return 1.0 - cost.comm_tail_s / cost.comm_forward_s if cost.comm_tail_s else 1.0


def _with_rows(
    blocks: tuple[BlockTimes, ...],
    groups: Sequence[FormGroup],
    held: Sequence[BlockParams],
    costs: StageCosts,
) -> tuple[BlockTimes, ...]:
    """The blocks where they make gradients of a share of their tables only."""
    if all([group.exchange.made == 1.0 for group in groups]):
        return blocks
    less = [0.0] * len(blocks)
    for group, params in zip(groups, held, strict=True):
        if group.exchange.made < 1.0:
            for index, own in enumerate(params.owned):
                less[index] += rows_left_out_s(own.trained_bytes, group.exchange.made, costs.device)
    return tuple(
        replace(block, weight_s=max(0.0, block.weight_s - seconds)) if seconds else block
        for block, seconds in zip(blocks, less, strict=True)
    )


def _trained(held: Sequence[BlockParams], sync: Sync) -> list[tuple[int, int]]:
    """Of each group: tensors that the optimizer steps over, and the bytes of this rank's part."""
    return [
        (
            ceil(own.tensors * (of.busiest or 1.0)),
            ceil(own.trained_bytes * of.stepped_share / of.parts("optimizer", group.shards)),
        )
        for own, group, of in zip(
            held, sync.groups, [group.exchange for group in sync.groups], strict=True
        )
    ]


def _total(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum([tensors for tensors, _ in sizes]), sum([nbytes for _, nbytes in sizes])


def _optimizer_time(
    tables: CostTables, costs: StageCosts, parts: Parts, sizes: Sequence[tuple[int, int]]
) -> OptimizerTime:
    """Of all optimizers, one after the other."""
    found = []
    for name in dict.fromkeys([part.update for part in parts]):
        for where, host in _by_place(name, parts, sizes, costs.host):
            if where:
                timed = optimizer_time(costs.device, name, *_total(where), tables.profile, host)
                made_s = 0.0 if host else _products_s(tables, costs, parts, name)
                found.append(replace(timed, seconds=timed.seconds + made_s))
    moved_s = _rows_moved_s(costs, parts, sizes) + _casting_s(costs, parts, sizes)
    if len(found) == 1:
        return replace(found[0], seconds=found[0].seconds + moved_s)
    whole_s = sum([one.seconds for one in found]) + moved_s
    band = sum([one.seconds * one.band for one in found]) / whole_s if whole_s else 0.0
    return OptimizerTime(whole_s, band, worst_source([one.source for one in found]))


def _products_s(tables: CostTables, costs: StageCosts, parts: Parts, name: str) -> float:
    """Products of matrices within an optimizer's step; of owners the one with most to do."""
    found = 0.0
    for part in parts:
        if part.update == name and part.shapes:
            dtype = tables.graph.tensors[next(iter(costs.cost.params))].dtype
            whole_s = products_s(costs.device, name, [(x.shape, dtype) for x in part.shapes])
            found += whole_s * (part.exchange.busiest or 1.0)
    return found


def _rows_moved_s(costs: StageCosts, parts: Parts, sizes: Sequence[tuple[int, int]]) -> float:
    """Seconds to take state of the rows that are stepped alone out of the whole, and to put those
    and their values back."""
    each = [
        (2 * update(part.update).copies + 1) * nbytes
        for part, (_, nbytes) in zip(parts, sizes, strict=True) if part.exchange.stepped
    ]  # fmt: skip
    return overheads_of(costs.device).copy_s(2 * sum(each)) if each else 0.0


def _casting_s(costs: StageCosts, parts: Parts, sizes: Sequence[tuple[int, int]]) -> float:
    """Seconds in which the host makes the copies that blocks read."""
    return sum([
        casting_s(costs.device, costs.host, nbytes, part.exchange.copied)
        for part, (_, nbytes) in zip(parts, sizes, strict=True) if part.exchange.copies_on_host
    ])  # fmt: skip


def _by_place(
    name: str, parts: Parts, sizes: Sequence[tuple[int, int]], host: HostShare | None
) -> Iterator[tuple[list[tuple[int, int]], HostShare | None]]:
    """What an optimizer steps on the device, and on the host."""
    for there in (False, True):
        yield [
            size for part, size in zip(parts, sizes, strict=True)
            if part.update == name and ("optimizer" in part.exchange.hosted) is there
        ], host if there else None  # fmt: skip
