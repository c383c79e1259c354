"""What a plan's devices make of its costs: slowest replica, borders, ZeRO, shared cores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from meshwright.costmodel.block.overlap import NOTHING, Hidden
from meshwright.costmodel.block.paired import Cut
from meshwright.costmodel.comm.borders import Passage, border, borders, handed_bytes, passage
from meshwright.costmodel.comm.comm import collective_time
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import BlockSpot, CostTables, Mode, StageCost
from meshwright.costmodel.ops.fused import runs, saved_by_kernels, with_routing
from meshwright.costmodel.simulate.compiled_schedule import table_of
from meshwright.costmodel.stage.replica_lines import ReplicaLines, lines_in
from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.device import DeviceType, HostShare
from meshwright.ir.graph.graph import Block
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.memo import Memo
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import HALVING, JOINING, MESH_AXES, BlockLayout, Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage on its devices: the slowest replica, and what it exchanges."""

    cost: StageCost
    blocks: tuple[Block, ...]
    modes: tuple[Mode, ...]
    """Per block: recomputed or not, or what becomes of what its ops make."""
    spot: BlockSpot
    device: DeviceType
    lines: ReplicaLines
    passage: Passage
    send_s: float
    border_bytes: int
    """Sent to the next stage by one rank for one micro-batch."""
    entry_bytes: int
    handed_bytes: int
    """Left of one micro-batch to the next stage where the same ranks have both."""
    taken_bytes: int
    """The same of the stage before."""
    shared_bytes: int
    """Of that, what both have saved: one memory."""
    sent_as_kept: int
    """Of what is sent or handed on, what its blocks have saved anyway: one memory."""
    back_s: float
    """Of a message with the gradients of what was sent."""
    border_back_bytes: int
    """Gradients that come back from the next stage, of one micro-batch, whoever has that."""
    entry_back_bytes: int
    """The same that go back to the stage before."""
    processes: int
    hidden: tuple[Hidden, ...] = ()
    """Per block, what goes on beside other work, or kernels save; empty if nothing does."""
    cuts: tuple[Cut | None, ...] = ()
    """Per block, in a stage whose actions run together with others."""
    packs: bool = False
    """Whether a kernel packs buckets."""
    updates: bool = False
    """Whether one steps the optimizer, and scales gradients as it reads them."""
    host: HostShare | None = None
    """What the device has of its host; None: it is its host."""

    @property
    def is_silent(self) -> bool:
        """Whether it sends something to the next stage, and no gradient comes back."""
        return self.border_bytes > 0 and not self.border_back_bytes


def silent_borders(costs: Sequence[StageCosts]) -> frozenset[int]:
    """Stages to which nothing comes back of what they send."""
    return frozenset([index for index, stage in enumerate(costs) if stage.is_silent])


def axis_ranks(stage: Stage, axis: str) -> tuple[int, ...]:
    """The first line of ranks along an axis of the stage."""
    if axis == "dp":
        return stage.devices[:: stage.model_size]
    at = MESH_AXES.index(axis)
    inner = prod(stage.mesh.get(name, 1) for name in MESH_AXES[at + 1 :])
    return stage.devices[: inner * stage.mesh.get(axis, 1) : inner]


_spots: Memo[tuple[object, ...], tuple[BlockSpot, ...]] = Memo()


def spots(tables: CostTables, stage: Stage) -> tuple[BlockSpot, ...]:
    """The distinct situations of the stage's replicas."""
    dp, model = stage.dp, stage.model
    shards = stage.mesh.get("dp_shard", 1)
    # Of replicas that train alone, a rank meets those of its own for some messages.
    own = shards if stage.sync is not None and exchange_of(stage).apart else 0
    # As `codegen.lower` has it, but for blocks that are to run on halves and cannot.
    joined = bool(tables.numbers.autocast and model and stage.overlap in JOINING)
    key = stage.devices, stage.batch_shares, model, stage.compile, stage.capture, own, joined
    known = _spots.of(tables)
    if key not in known:
        size, names = stage.model_size, tables.device_names
        replicas = stage.devices[::size]
        dp_levels = tables.levels(replicas)
        found: dict[BlockSpot, None] = {}
        for coordinate in range(dp):
            replica = stage.devices[coordinate * size : (coordinate + 1) * size]
            levels = tables.model_levels(replica, model)
            first = coordinate - coordinate % own if own else 0
            own_levels = tables.levels(replicas[first : first + own]) if own else None
            for name in sorted({names[rank] for rank in replica}):
                share = stage.batch_shares[coordinate]
                spot = BlockSpot(
                    share,
                    dp,
                    model,
                    name,
                    dp_levels,
                    levels,
                    stage.compile,
                    own_levels,
                    stage.capture,
                    joined,
                )
                found[spot] = None
        known[key] = tuple(found)
    return known[key]


def stage_costs(tables: CostTables, plan: Plan, index: int) -> StageCosts:
    """Cost of stage `index` of the plan on its slowest replica."""
    stage = plan.stages[index]
    first, last = tables.block_index[stage.first], tables.block_index[stage.last]
    blocks = tables.graph.blocks[first : last + 1]
    layouts = layouts_of(plan, stage)
    modes = _modes(stage, blocks)
    candidates = [(tables.stage(blocks, layouts, modes, s), s) for s in spots(tables, stage)]
    cost, spot = max(candidates, key=lambda c: c[0].forward_s + c[0].backward_s)
    cuts: tuple[Cut | None, ...] = ()
    if index in paired_stages(plan):
        cuts = tuple([tables.blocks.cut(b, layouts[b.pattern], spot) for b in blocks])
    hidden = (
        _hidden_alone(tables, cuts)
        or _hidden(tables, stage, blocks, modes, layouts, spot)
        or saved_by_kernels(tables, plan, index, blocks, layouts, spot)
    )
    send_s, sent = border(tables, plan, index)
    between = borders(tables, plan)[index]
    back_s, sent_back = border(tables, plan, index, back=True)
    entered = left = 0
    if index:
        entered, left = [border(tables, plan, index - 1, back=back)[1] for back in (False, True)]
    taken, handed = (handed_bytes(tables, plan, i) for i in (index - 1, index))
    return StageCosts(
        cost=cost,
        blocks=blocks,
        modes=modes,
        spot=spot,
        device=tables.devices[spot.device],
        lines=lines_in(tables, stage),
        passage=passage(tables, between, spot),
        send_s=send_s,
        border_bytes=sent,
        entry_bytes=entered,
        handed_bytes=handed,
        taken_bytes=taken,
        shared_bytes=_shared_bytes(tables, plan, index, spot, taken) if taken else 0,
        sent_as_kept=_sent_as_kept(tables, last, cost, blocks, sent + handed),
        back_s=back_s,
        border_back_bytes=sent_back + handed_bytes(tables, plan, index, back=True),
        entry_back_bytes=left + handed_bytes(tables, plan, index - 1, back=True),
        processes=len(stage.devices),
        hidden=with_routing(tables, plan, index, blocks, layouts, spot, hidden),
        cuts=cuts,
        packs=runs(tables, plan, index, "bucket"),
        updates=runs(tables, plan, index, "bucket_update"),
        host=tables.hosts[spot.device],
    )


def _sent_as_kept(
    tables: CostTables, last: int, cost: StageCost, blocks: Sequence[Block], sent: int
) -> int:
    """Bytes of what is sent that the stage has saved, whichever of its blocks has made it, if all
    is sent as it is."""
    crossing = tables.crossing(last + 1) if sent else ()
    made = [
        (name, nbytes)
        for block, own in zip(blocks, cost.blocks, strict=True)
        for name, nbytes in zip(block.outputs, own.output_bytes, strict=True)
        if name in crossing
    ]
    if sent != sum([nbytes for _, nbytes in made]):
        return 0
    kept, facts = dict(cost.kept), tables.facts
    # What lies in another order than it is read in is copied before it is sent.
    as_kept = [(name, nbytes) for name, nbytes in made if name not in facts.turned]
    return sum([min(nbytes, kept.get(facts.roots[name], 0)) for name, nbytes in as_kept])


def _shared_bytes(tables: CostTables, plan: Plan, index: int, spot: BlockSpot, taken: int) -> int:
    """Of `taken` bytes that stage `index` takes from the one before on the same ranks, those that
    both save; 0 where it is not sure that they are one memory."""
    source, target = plan.stages[index - 1], plan.stages[index]
    alike = source.mesh == target.mesh and source.batch_shares == target.batch_shares
    if not alike or source.capture or target.capture:  # recorded calls have copies
        return 0
    # Micro-batches of which all is kept differ from others in what stages save.
    if table_of(tables.schedule(plan.schedule)).early:
        return 0
    home = tables.graph.blocks[tables.block_index[source.last]]
    reader = tables.graph.blocks[tables.block_index[target.first]]
    made = tables.block(home, layouts_of(plan, source)[home.pattern], spot, mode_of(source, home))
    read = tables.block(
        reader, layouts_of(plan, target)[reader.pattern], spot, mode_of(target, reader)
    )
    left = dict(zip(home.outputs, made.saved_outputs, strict=True))
    saved = zip(reader.inputs, read.saved_inputs, strict=True)
    both = [name for name, nbytes in saved if nbytes == taken == left.get(name)]
    return taken if len(both) == 1 else 0


def _hidden(
    tables: CostTables,
    stage: Stage,
    blocks: Sequence[Block],
    modes: Sequence[Mode],
    layouts: Mapping[str, BlockLayout],
    spot: BlockSpot,
) -> tuple[Hidden, ...]:
    if stage.overlap == "none" or stage.model_size == 1:
        return ()
    halved = stage.overlap in HALVING
    found = tuple(
        NOTHING
        # Where `saved` says something of its ops, it runs as it is or on halves.
        if isinstance(mode, tuple)
        and not (halved and tables.blocks.parts(block, layouts[block.pattern], spot))
        else tables.blocks.hidden(block, layouts[block.pattern], spot, stage.overlap)
        for block, mode in zip(blocks, modes, strict=True)
    )
    if stage.overlap == "blocks" and len(set(stage.batch_shares)) == 1:
        found = _over_borders(tables, blocks, layouts, spot, found)
    # Where processes share cores, a collective takes them from other work that it runs beside.
    shared = slowdown(tables.cluster) > 1.0
    return tuple(one.unhidden() for one in found) if shared else found


def _hidden_alone(tables: CostTables, cuts: Sequence[Cut | None]) -> tuple[Hidden, ...]:
    """Of blocks that work in turns with another stage, what is hidden where that does nothing."""
    found = tuple(NOTHING if cut is None else cut.alone for cut in cuts)
    return tuple(one.unhidden() for one in found) if slowdown(tables.cluster) > 1.0 else found


def _over_borders(
    tables: CostTables,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayout],
    spot: BlockSpot,
    found: tuple[Hidden, ...],
) -> tuple[Hidden, ...]:
    """What is hidden of each block, with halves that go on to the next; `found`: where they do not.
    What is made again is made block by block."""
    chained: list[Hidden] = []

    def goes_on(index: int) -> bool:
        block = blocks[index]
        return tables.blocks.parts(block, layouts[block.pattern], spot) > 1

    for joins, run in groupby(range(len(blocks)), goes_on):
        own = list(run)
        if joins:
            chained += tables.blocks.chained([blocks[i] for i in own], layouts, spot)
        else:
            chained += [found[i] for i in own]
    return tuple(
        replace(more, again_s=one.forward_s) for more, one in zip(chained, found, strict=True)
    )


def _modes(stage: Stage, blocks: Sequence[Block]) -> tuple[Mode, ...]:
    """Of each block; those that are not named themselves are as their patterns."""
    named = stage.saved.keys() | stage.recompute.keys()
    known: dict[str, Mode] = {}
    found = []
    for block in blocks:
        key = block.name if block.name in named else block.pattern
        if key not in known:
            known[key] = mode_of(stage, block)
        found.append(known[key])
    return tuple(found)


def mode_of(stage: Stage, block: Block) -> Mode:
    """How a stage keeps what a block's backward needs."""
    policy = stage.keeping(block)
    return tuple(sorted(policy.items())) if policy else stage.recomputes(block)


def layouts_of(plan: Plan, stage: Stage) -> Mapping[str, BlockLayout]:
    named = {layout.name: layout for layout in plan.layouts}
    return {pattern: named[name] for pattern, name in stage.layouts.items()}


def tied_between(tables: CostTables, plan: Plan, costs: Sequence[StageCosts]) -> dict[int, float]:
    """Stage -> seconds of summing gradients of parameters that several stages use."""
    users = {
        name: [i for i, stage in enumerate(costs) if name in stage.cost.params]
        for name in tables.tied
    }
    seconds: dict[int, float] = {}
    for name, stages in users.items():
        if len(stages) < 2 or len({plan.stages[i].devices for i in stages}) < 2:
            continue
        levels = tables.levels(tuple(dict.fromkeys(plan.stages[i].devices[0] for i in stages)))
        size = max(costs[i].cost.params[name] for i in stages)
        for i in stages:
            took = collective_time(Primitive.ALL_REDUCE, size, levels)
            seconds[i] = seconds.get(i, 0.0) + took
    return seconds
