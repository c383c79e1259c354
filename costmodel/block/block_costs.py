"""Costs of blocks, each computed once: measured where a profile has them, else op by op."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pydantic import RootModel

from meshwright.costmodel.block.block import BlockCost, at_links, summary, walk_block
from meshwright.costmodel.block.chunks import in_chunks
from meshwright.costmodel.block.clock import Tape
from meshwright.costmodel.block.keeping import Makers, Policy, kept_cost, makers_of
from meshwright.costmodel.block.measured_blocks import as_alone, beside, between, measured_cost
from meshwright.costmodel.block.one_cast import casts_once
from meshwright.costmodel.block.overlap import (
    Computing,
    Hidden,
    WalkTurns,
    beside_weights,
    can_halve,
    chained,
    computing,
    in_halves,
    in_halves_s,
    is_worth,
    turns_of,
)
from meshwright.costmodel.block.paired import Cut, cut_of
from meshwright.costmodel.block.price_ops import GraphFacts, StageSite, Walk
from meshwright.costmodel.block.site import USUAL
from meshwright.costmodel.block.value_placements import Fed
from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.ops.compute import KeptTimes, OpTime, OpTimer
from meshwright.costmodel.ops.fused import routing_saves
from meshwright.costmodel.ops.joint import Price, prices
from meshwright.costmodel.ops.keys import block_key
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.graph.graph import Block
from meshwright.ir.layout.layout import Axis
from meshwright.ir.placed.spots import LaidBlock
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.ir.plan.plan import Overlap as OverlapLevel
from meshwright.ir.plan.sampled import sampled_axes
from meshwright.ir.profile.profile import BlockRecord, Profile
from meshwright.ir.styles import Style


@dataclass(frozen=True, slots=True)
class BlockSpot:
    """All that a block's cost depends on besides the block and its layout."""

    samples: int
    """Of one micro-batch on this rank."""
    dp: int
    model: ModelMesh
    device: str
    dp_levels: Levels
    model_levels: tuple[Levels, ...]
    """Tiers of the rank's line on each of the model axes."""
    compiled: bool = False
    """By torch.compile."""
    own_levels: Levels | None = None
    """Of dp, those within a replica, where replicas train alone; None: they do not."""
    captured: bool = False
    """In CUDA graphs."""
    joined: bool = False
    """Products that read one value which has come are one call, which casts it once."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Costs are looked up by spot very often, and tiers are long.
        parts = (self.samples, self.dp, self.model, self.device, self.dp_levels,
                 self.model_levels, self.compiled, self.own_levels, self.captured,
                 self.joined)  # fmt: skip
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each layout axis."""
        return {"dp": self.dp, **dict(self.model)}

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return prod(size for _, size in self.model)


_Kind = tuple[str, Fed, str]
_Id = tuple[_Kind, BlockSpot]
_Axes = tuple[_Kind, ModelMesh, bool]
"""A block with its axes: what happens to which value does not depend on samples or replicas."""
_WalkKey = tuple[str, str, ModelMesh, bool, bool]
RECENT = 8
"""Walks that are kept, for those who ask for one several times in a row: all would be too many."""


def _without_links(at: _Id) -> tuple[object, ...]:
    kind, spot = at
    return kind, spot.samples, spot.dp, spot.model, spot.device, spot.joined


def _walk_key(block: Block, layout_key: str, spot: BlockSpot) -> _WalkKey:
    return block.name, layout_key, spot.model, spot.dp > 1, spot.joined


def _halves_of(spot: BlockSpot, ranks: int, parts: int) -> list[BlockSpot]:
    """Of a replica of which so many ranks have samples of their own; itself, of one part."""
    if parts < 2:
        return [spot]
    each = spot.samples // ranks
    return [replace(spot, samples=n * ranks) for n in (each - each // 2, each // 2)]


def on_data_alone(layout: BlockLayout) -> BlockLayout:
    """The layout where there are no model axes."""

    def rows(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
        return {key: _data(placed) for key, placed in found.items()}

    return replace(
        layout, mesh={}, parameters=rows(layout.parameters), ops=rows(layout.ops),
        inputs=tuple(map(_data, layout.inputs)), outputs=tuple(map(_data, layout.outputs)),
    )  # fmt: skip


def _data(placed: Mapping[str, str]) -> dict[str, str]:
    return {axis: text for axis, text in placed.items() if axis == "dp"}


class BlockCosts:
    """Keeps every cost and every key that it has computed."""

    def __init__(
        self,
        facts: GraphFacts,
        devices: Mapping[str, DeviceType],
        timer: OpTimer | None = None,
        profile: Profile | None = None,
        run_as: Style = USUAL,
        *,
        shares_cores: bool = False,
    ) -> None:
        self._run_as, self._shares_cores = run_as, shares_cores
        self._facts, self._devices, self._timer = facts, devices, KeptTimes(timer)
        self._profile = profile
        self._costs: dict[_Id, BlockCost] = {}
        self._anywhere: dict[tuple[object, ...], tuple[BlockCost, Tape]] = {}
        """Costs by some links, and what they were added up from."""
        self._kept: dict[tuple[_Id, Policy], BlockCost] = {}
        self._makers: dict[_Id, Makers] = {}
        self._keys: dict[_Id, str] = {}
        self._hidden: dict[tuple[_Kind, BlockSpot, OverlapLevel], Hidden] = {}
        self._joint: dict[_Id, dict[tuple[str, str], Price]] = {}
        self._routing: dict[_Id, Hidden] = {}
        self._sampled: dict[str, tuple[str, ...]] = {}
        """Layout -> the axes that split samples as dp does."""
        self._cuts: dict[_Id, Cut | None] = {}
        self._halvable: dict[_Axes, tuple[bool, bool]] = {}
        """Whether blocks run on halves, if they have several samples, or on all together."""
        self._times: dict[tuple[object, ...], list[OpTime]] = {}
        self._turns: dict[_Axes, WalkTurns] = {}
        self._computing: dict[_Id, Computing] = {}
        self._chains: dict[tuple[_Id, ...], tuple[Hidden, ...]] = {}
        self._walks: dict[_WalkKey, Walk] = {}
        self._recent: dict[tuple[_WalkKey, BlockSpot], Walk] = {}
        self._apart: dict[_Kind, bool] = {}
        """Blocks, and whether their replicas have nothing to do with each other while they run."""
        self._alike: dict[BlockSpot, BlockSpot] = {}
        """Spots of such blocks -> one that stands for all numbers of replicas."""
        self._layout_keys: dict[int, tuple[BlockLayout, str]] = {}
        blocks = profile.blocks.values() if profile else ()
        self._samples = sorted({(record.tp, record.samples) for record in blocks})

    def cost(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> BlockCost:
        """Of one micro-batch of the block; equal for all blocks of its pattern."""
        if spot.compiled and not self.is_measured(block, layout, spot):
            spot = replace(spot, compiled=False)
        at = self._id(block, layout, spot)
        if at[0] not in self._apart and (spot.dp > 1 or not self._profile):
            self.is_apart(block, layout, spot)
            at = self._id(block, layout, spot)
        if at not in self._costs:
            known = self._anywhere.get(_without_links(at))
            if known:
                cost = self._costs[at] = at_links(*known, self.site(at[1]))
                return cost
            walk = self.walk(block, layout, at[1])
            cost = summary(walk, block, layout)
            self._times[_without_links(at)] = walk.times
            if not self._profile:
                self._anywhere[_without_links(at)] = cost, walk.tape
            if self._profile and self._devices[spot.device].kind == self._profile.machine.kind:
                self._keys[at] = self._key(walk, at[1])
                cost = self._measured(block, layout, spot, walk, cost)
            self._costs[at] = cost
        return self._costs[at]

    def is_apart(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> bool:
        """Whether its replicas have nothing to do with each other while it runs: then it costs as
        much whatever their number, and one walk is for all (a profile knows what was measured of
        one replica apart)."""
        kind, _ = self._id(block, layout, spot)
        if kind not in self._apart:
            walk = self.walk(block, layout, self._alike_of(spot))
            self._apart[kind] = not walk.communicates("dp")
        return self._apart[kind]

    def is_measured(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> bool:
        """Whether the profile has the block, of this or other numbers of samples."""
        if not self._profile or self._devices[spot.device].kind != self._profile.machine.kind:
            return False
        known = self.key(block, layout, spot) in self._profile.blocks
        return known or any(self._neighbours(block, layout, spot))

    def kept(self, block: Block, layout: BlockLayout, spot: BlockSpot, policy: Policy) -> BlockCost:
        """The same under a policy on what its ops make (`ir.plan.keeping`)."""
        at = self._id(block, layout, spot)
        if (at, policy) not in self._kept:
            cost = self.cost(block, layout, spot)
            makers = self.makers(block, layout, spot)
            self._kept[at, policy] = kept_cost(cost, block, makers, policy)
        return self._kept[at, policy]

    def makers(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Makers:
        """Who makes what of a block."""
        at = self._id(block, layout, spot)
        if at not in self._makers:
            self._makers[at] = makers_of(self._facts, block, layout, self.site(at[1]), self._timer)
        return self._makers[at]

    def hidden(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, overlap: OverlapLevel
    ) -> Hidden:
        """What goes on beside other work if the stage asks for it."""
        # What goes on into the next block is for a run of them to say (`chained`).
        level: OverlapLevel = "block" if overlap == "blocks" else overlap
        if level == "block" and not self.parts(block, layout, spot):
            level = "linear"
        at = (*self._id(block, layout, spot), level)
        if at not in self._hidden:
            self._hidden[at] = self._overlapped(block, layout, spot, level)
        return self._hidden[at]

    def joint(
        self, block: Block, layout: BlockLayout, spot: BlockSpot
    ) -> Mapping[tuple[str, str], Price]:
        """(kernel, `Op.key`) -> price of a call that takes over an op with its collective."""
        at = self._id(block, layout, spot)
        if at not in self._joint:
            laid = LaidBlock(self._facts.graph, block, layout, self.site(spot).axes)
            self._joint[at] = prices(self.walk(block, layout, spot), laid)
        return self._joint[at]

    def routing(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Hidden:
        """What the kernel `route` saves in the block."""
        at = self._id(block, layout, spot)
        if at not in self._routing:
            self._routing[at] = routing_saves(self.walk(block, layout, spot))
        return self._routing[at]

    def cut(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Cut | None:
        """The block on all its samples, cut where it waits for collectives; None: it waits for
        none beside which something may be."""
        at = self._id(block, layout, spot)
        if at not in self._cuts:
            walk = self.walk(block, layout, spot)
            self._cuts[at] = cut_of(walk) if is_worth(walk) else None
        return self._cuts[at]

    def chained(
        self, blocks: Sequence[Block], layouts: Mapping[str, BlockLayout], spot: BlockSpot
    ) -> tuple[Hidden, ...]:
        """The same of a run of blocks whose halves go on from one to the next."""
        at = tuple(self._id(block, layouts[block.pattern], spot) for block in blocks)
        if at not in self._chains:
            walks = {
                key: [self.walk(block, layout, spot), *self._halved(block, layout, spot)]
                for key, block in dict(zip(at, blocks, strict=True)).items()
                for layout in [layouts[block.pattern]]
            }
            self._chains[at] = chained([walks[k][0] for k in at], [walks[k][1:] for k in at])
        return self._chains[at]

    def parts(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> int:
        """On how many parts of its samples the block runs where something is to go on beside its
        messages: 2 for halves; 1 for all together, where tokens travel; 0: it runs as it is."""
        axes = self._axes(block, layout, spot)
        if axes not in self._halvable:
            walk = self._any_walk(block, layout, spot)
            can = can_halve(self._facts.graph, block, layout)
            can = can and is_worth(walk, self._sampled_axes(layout))
            self._halvable[axes] = can, bool(walk.travels) and is_worth(walk)
        in_two, together = self._halvable[axes]
        if in_two and spot.samples >= 2 * self._ranks_apart(layout, spot):
            return 2
        return int(together)

    def _sampled_axes(self, layout: BlockLayout) -> tuple[str, ...]:
        key = self.layout_key(layout)
        if key not in self._sampled:
            self._sampled[key] = sampled_axes(layout)
        return self._sampled[key]

    def _parts_of(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> list[BlockSpot]:
        parts = self.parts(block, layout, spot)
        return _halves_of(spot, self._ranks_apart(layout, spot), parts)

    def _ranks_apart(self, layout: BlockLayout, spot: BlockSpot) -> int:
        """Ranks of a replica that have samples of their own."""
        axes = self._sampled_axes(layout)
        return prod([size for axis, size in spot.model if axis in axes])

    def in_halves_s(
        self, block: Block, layout: BlockLayout, spot: BlockSpot
    ) -> tuple[float, float]:
        """What its computing takes more on halves of its samples, forward and back; below 0 where
        it takes less. Quicker than `hidden`, which has it too."""
        whole = self._computing_of(block, layout, spot)
        halves = [
            self._computing_of(block, layout, half) for half in self._parts_of(block, layout, spot)
        ]
        return in_halves_s(whole, halves, self._devices[spot.device])

    def _computing_of(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Computing:
        at = self._id(block, layout, spot)
        if at not in self._computing:
            key = _without_links(at)
            if key not in self._times:
                self._times[key] = self.walk(block, layout, spot).times
            axes = self._axes(block, layout, spot)
            if axes not in self._turns:
                self._turns[axes] = turns_of(self._any_walk(block, layout, spot))
            self._computing[at] = computing(self._times[key], self._turns[axes])
        return self._computing[at]

    def _halved(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> list[Walk]:
        return [self.walk(block, layout, half) for half in self._parts_of(block, layout, spot)]

    def _overlapped(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, overlap: OverlapLevel
    ) -> Hidden:
        walk = self.walk(block, layout, spot)
        if overlap == "block":
            return in_halves(walk, self._halved(block, layout, spot))
        if self._run_as.chunks and overlap != "none":
            return in_chunks(walk)
        return beside_weights(walk, rows=overlap != "gradients")

    def key(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> str:
        """Under which a profile has the block."""
        at = self._id(block, layout, spot)
        if at not in self._keys:
            self._keys[at] = self._key(self.walk(block, layout, spot), spot)
        return self._keys[at]

    def layout_key(self, layout: BlockLayout) -> str:
        """A text that equal layouts share."""
        held = self._layout_keys.get(id(layout))
        if held is None:
            text = json.dumps(RootModel[BlockLayout](layout).model_dump(), sort_keys=True)
            held = self._layout_keys[id(layout)] = (layout, text)
        return held[1]

    def site(self, spot: BlockSpot) -> StageSite:
        """The first rank of a stage."""
        # Local shapes depend on this rank's share alone, so all shares may be called equal.
        shares = (spot.samples,) * spot.dp
        data = Axis(spot.dp, shares, self._facts.graph.batch_size)
        names = [axis for axis, _ in spot.model]
        return StageSite(
            axes={"dp": data, **{axis: Axis(size) for axis, size in spot.model}},
            coordinates=dict.fromkeys(["dp", *names], 0),
            device=self._devices[spot.device],
            levels={"dp": spot.dp_levels, **dict(zip(names, spot.model_levels, strict=True))},
            run_as=self._run_as,
            shares_cores=self._shares_cores,
            own_levels=spot.own_levels,
        )

    def _id(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> _Id:
        kind = block.pattern, self._facts.fed(block), self.layout_key(layout)
        apart = self._apart.get(kind) and (spot.dp > 1 or not self._profile)
        return kind, self._alike_of(spot) if apart else spot

    def _alike_of(self, spot: BlockSpot) -> BlockSpot:
        """The spot that stands for all numbers of replicas."""
        alike = self._alike.get(spot)
        if alike is None:
            alike = self._alike[spot] = replace(spot, dp=2, dp_levels=(), own_levels=None)
        return alike

    def walk(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Walk:
        """All ops and conversions of the block, priced."""
        key = _walk_key(block, self.layout_key(layout), spot)
        at = key, spot
        if at not in self._recent:
            while len(self._recent) >= RECENT:
                self._recent.pop(next(iter(self._recent)))
            site, known = self.site(spot), self._walks.get(key)
            if known is None:
                walk = self._walks[key] = walk_block(self._facts, block, layout, site, self._timer)
                if spot.joined:
                    casts_once(walk)
            else:
                walk = known.again(site, spot.samples)
                walk.clock.settle(site.device)
            self._recent[at] = walk
        return self._recent[at]

    def _any_walk(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Walk:
        """A walk on the same axes, whatever its samples."""
        key = _walk_key(block, self.layout_key(layout), spot)
        return self._walks.get(key) or self.walk(block, layout, spot)

    def _axes(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> _Axes:
        return self._id(block, layout, spot)[0], spot.model, spot.dp > 1

    def _key(self, walk: Walk, spot: BlockSpot) -> str:
        precision = self._facts.precision.measured_as
        return block_key(walk.trail, precision, spot.sizes, compiled=spot.compiled)

    def _measured(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, walk: Walk, cost: BlockCost
    ) -> BlockCost:
        """The cost by the profile, or by that of other numbers of samples; else as it is."""
        assert self._profile
        record = self._profile.blocks.get(self.key(block, layout, spot))
        if record is not None:
            return measured_cost(cost, walk, record)
        low, high = self._neighbours(block, layout, spot)
        near = low or high
        if near is None:
            return self._as_alone(block, layout, spot, cost) if spot.model else cost
        if low and high:
            found, band = between(low, high, spot.samples)
        else:
            there = replace(spot, samples=near.samples)
            theirs = summary(self.walk(block, layout, there), block, layout)
            found, band = beside((near, theirs), cost, spot.samples)
        return measured_cost(cost, walk, found, "interpolated", band)

    def _as_alone(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, cost: BlockCost
    ) -> BlockCost:
        """The cost corrected by what was measured of the block on no model axes. Otherwise blocks
        that nobody measured would look faster than those that somebody did."""
        whole = on_data_alone(layout)
        samples = max(1, round(spot.samples / spot.model_size))
        alone = replace(spot, samples=samples, model=(), model_levels=())
        modelled = summary(self.walk(block, whole, alone), block, whole)
        return as_alone(cost, self.cost(block, whole, alone), modelled)

    def _neighbours(
        self, block: Block, layout: BlockLayout, spot: BlockSpot
    ) -> tuple[BlockRecord | None, BlockRecord | None]:
        """The block as measured with the next fewer and the next more samples."""
        assert self._profile
        low = high = None
        for tp, samples in self._samples:
            if tp != spot.model_size or high:
                continue
            key = self.key(block, layout, replace(spot, samples=samples))
            found = self._profile.blocks.get(key)
            if found and samples < spot.samples:
                low = found
            elif found:
                high = found
        return low, high
