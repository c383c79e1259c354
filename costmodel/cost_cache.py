"""Costs that many plans share, each computed once: equal blocks, equal stages, groups, borders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.costmodel.as_run import as_run
from meshwright.costmodel.block.block import BlockCost, PreludeCost, price_prelude
from meshwright.costmodel.block.block_costs import BlockCosts
from meshwright.costmodel.block.block_costs import BlockSpot as BlockSpot
from meshwright.costmodel.block.keeping import Policy
from meshwright.costmodel.block.layer_profile import layer_timer
from meshwright.costmodel.block.price_ops import GraphFacts
from meshwright.costmodel.comm.comm import Levels, group_levels, used_by
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.elsewhere import as_elsewhere
from meshwright.costmodel.fit.calibrated import calibrated
from meshwright.costmodel.memory.waiting import last_readers, waiting_bytes
from meshwright.costmodel.ops.captured import capturing
from meshwright.costmodel.ops.compute import OpTimer, worst_source
from meshwright.costmodel.ops.profile_timer import profile_timer
from meshwright.costmodel.stage.buckets import BUCKET_BYTES
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, HostShare, Link, Source
from meshwright.ir.cluster.host import host_of
from meshwright.ir.graph.graph import DTYPE_BYTES, Block, Graph, Kind
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.memo import Memos
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, ScheduleTable, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.ir.precision import precision as known_precision
from meshwright.ir.profile.profile import Profile
from meshwright.ir.styles import style as known_style

Mode = bool | Policy
"""Whether a block is recomputed whole, or what becomes of what its ops make."""


class Passing(NamedTuple):
    """A value that is there while blocks run that have not made it and do not keep it."""

    name: str
    nbytes: int
    first: int
    """Position of the first block in whose forward it is there, though that has not made it."""
    last: int
    """Of the last."""


def _read_by(
    blocks: Sequence[Block],
    costs: Sequence[BlockCost],
    roots: Mapping[str, str],
    kept: Mapping[str, int],
) -> tuple[int, ...]:
    """`StageCost.block_read`: autograd has the leaf that a block reads as long as its graph."""
    found, made = [0] * len(blocks), dict[str, int]()
    for index, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
        for name in block.inputs:
            root = roots[name]
            if root in made:
                if root in kept:
                    found[index] += kept[root]
                    found[made[root]] -= kept[root]
                del made[root]
        for name, nbytes in zip(block.outputs, cost.saved_outputs, strict=True):
            if not nbytes:
                made[roots[name]] = index
    return tuple(found)


def _passing_by_block(passing: Sequence[Passing], blocks: int) -> tuple[int, ...]:
    found = [0] * blocks
    for value in passing:
        for index in range(value.first, value.last + 1):
            found[index] += value.nbytes
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One micro-batch of a run of blocks on one rank."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    comm_forward_s: float
    comm_backward_s: float
    saved_bytes: int
    """Per micro-batch in flight."""
    params: Mapping[str, int]
    """Local bytes of each parameter and buffer, tied ones once."""
    summed_over: Mapping[str, frozenset[str]]
    """Parameter -> model axes that its gradient is summed over once per step, if any."""
    workspace_bytes: int
    source: Source
    uncertain_s: float = 0.0
    """Seconds times relative error, summed over its blocks."""
    blocks: tuple[BlockCost, ...] = ()
    """Each block, as it is recomputed or not; `forward_s` has the prelude beside them."""
    block_saved: tuple[int, ...] = ()
    """`saved_bytes` by the block whose backward is the last to need them."""
    block_entering: tuple[int, ...] = ()
    """Of `block_saved`, what is there before the block's forward: of what enters, what no earlier
    block keeps."""
    block_read: tuple[int, ...] = ()
    """Where a backward runs in halves, bytes that go with a block's second half and of
    `block_saved` are an earlier one's, less those that go with a later one's: what a block reads
    and the one that made it does not keep."""
    block_passing: tuple[int, ...] = ()
    """What is there as a block's forward runs and goes with the last one that reads it: values of
    the prelude that none keeps."""
    block_waiting: tuple[int, ...] = ()
    """Gradients that are there while a block's backward runs, and wait for an earlier one."""
    block_released: tuple[int, ...] = ()
    """Of `block_saved`, what goes with the first half of a backward that is split, of values that
    come into a block."""
    kept: tuple[tuple[str, int], ...] = ()
    """Memory that blocks keep of values that enter or leave one, by the value that it is of."""

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s


class CostTables:
    """Costs of one graph on one cluster under one precision; keeps everything it has computed."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        precision: str,
        timer: OpTimer | None = None,
        profile: Profile | None = None,
        bucket_bytes: int | None = None,
        style: str = "",
    ) -> None:
        """`style`: the stack whose runs times are of, a file of `ir/styles`."""
        self.run_as = known_style(style)
        self.graph = graph
        self.style = style
        known = as_elsewhere(cluster)
        self.cluster = as_run(calibrated(known, profile) if profile else known, self.run_as)
        self.precision = precision
        self.profile = profile
        self.bucket_bytes = bucket_bytes or self.run_as.bucket_bytes or BUCKET_BYTES
        """Gradients that are reduced together."""
        numbers = self.run_as.numbers(known_precision(precision))
        self.facts = GraphFacts.of(graph, numbers, self.cluster.kind)
        self._timer = timer
        timer = timer or layer_timer(graph) or profile_timer(self.cluster, profile)
        self.numbers = self.facts.precision
        devices = {device.name: device for device in self.cluster.device_types}
        self.blocks = BlockCosts(
            self.facts, devices, timer, profile, self.run_as,
            shares_cores=slowdown(self.cluster) > 1.0,
        )  # fmt: skip
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._preludes: dict[object, PreludeCost] = {}
        self._levels: dict[tuple[int, ...], Levels] = {}
        self._borders: dict[tuple[int, bool], tuple[int, int]] = {}
        self._links: dict[tuple[tuple[int, ...], int, tuple[int, ...], int], frozenset[Link]] = {}
        self._schedules: dict[tuple[str, ...], Schedule] = {}
        self.memos = Memos()

    @cached_property
    def captured(self) -> BlockCosts:
        """Costs of blocks that are recorded in CUDA graphs: by their ops, as no profile has any."""
        cluster = replace(
            self.cluster, device_types=tuple(map(capturing, self.cluster.device_types))
        )
        devices = {device.name: device for device in cluster.device_types}
        timer = self._timer or layer_timer(self.graph) or profile_timer(cluster, self.profile)
        return BlockCosts(self.facts, devices, timer, None, self.run_as)

    @cached_property
    def block_index(self) -> dict[str, int]:
        """Block name -> position."""
        return {block.name: i for i, block in enumerate(self.graph.blocks)}

    @property
    def device_names(self) -> tuple[str, ...]:
        """Device type name of each rank."""
        return self.cluster.device_names

    @cached_property
    def devices(self) -> dict[str, DeviceType]:
        return {device.name: device for device in self.cluster.device_types}

    @cached_property
    def hosts(self) -> dict[str, HostShare | None]:
        """What a device of each type has of its host."""
        return {name: host_of(self.cluster, device) for name, device in self.devices.items()}

    @cached_property
    def _last_readers(self) -> Mapping[str, int]:
        return last_readers(self.graph)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters with gradients."""
        return frozenset(t.name for t in self.graph.parameters if t.requires_grad)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters without."""
        return frozenset(t.name for t in self.graph.parameters if not t.requires_grad)

    @cached_property
    def as_stepped(self) -> frozenset[str]:
        """Names of the parameters with gradients that blocks read themselves, where they read
        copies of others."""
        copies = self.numbers.copies
        return frozenset(
            t.name for t in self.graph.parameters
            if copies and t.requires_grad and t.dtype != copies
        )  # fmt: skip

    @cached_property
    def still(self) -> frozenset[str]:
        """Names of the blocks that have no backward, as no gradient comes to what they make."""
        tensors = self.graph.tensors
        return frozenset(
            block.name for block in self.graph.blocks
            if not any(tensors[name].requires_grad for name in block.outputs)
        )  # fmt: skip

    @cached_property
    def shared(self) -> Mapping[str, None]:
        """Parameters and buffers that several blocks read, in order."""
        seen = Counter(name for block in self.graph.blocks for name in dict.fromkeys(block.params))
        return {name: None for name, count in seen.items() if count > 1}

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """Parameters with gradients that several blocks read."""
        return tuple(name for name in self.shared if name in self.trained)

    @cached_property
    def param_kinds(self) -> dict[str, tuple[tuple[str, bool] | None, ...]]:
        """Block name -> (dtype, trained) of each of its parameters, None for what is none; equal
        blocks share one object."""
        known: dict[object, tuple[tuple[str, bool] | None, ...]] = {}
        found = {}
        for block in self.graph.blocks:
            tensors = [self.graph.tensors[name] for name in block.params]
            kinds = tuple([(t.dtype, t.requires_grad) if t.kind is Kind.PARAMETER else None
                           for t in tensors])  # fmt: skip
            found[block.name] = known.setdefault(kinds, kinds)
        return found

    def levels(self, ranks: Sequence[int]) -> Levels:
        """Tiers of a group of ranks."""
        key = tuple(ranks)
        if key not in self._levels:
            self._levels[key] = group_levels(key, self.cluster)
        return self._levels[key]

    def model_levels(self, replica: Sequence[int], model: ModelMesh) -> tuple[Levels, ...]:
        """Tiers of the line through the first rank of a replica on each model axis."""
        found, stride = [], len(replica)
        for _, size in model:
            stride //= size
            found.append(self.levels(replica[: stride * size : stride]))
        return tuple(found)

    def links(self, source: Stage, target: Stage) -> frozenset[Link]:
        """Links between the ranks of two stages that talk to each other, taking shares as even;
        ports of nodes as those ranks share them that send at once."""
        ours, theirs, dp, others = source.model_size, target.model_size, source.dp, target.dp
        key = (source.devices, ours, target.devices, theirs)
        if key not in self._links:
            nodes = self.cluster.node_numbers
            pairs = {
                (
                    nodes[source.devices[to * dp // others * ours + i % ours]],
                    nodes[target.devices[to * theirs + i]],
                )
                for to in range(others)
                for i in range(theirs)
            }
            found = frozenset(self.cluster.link_of_nodes(*pair) for pair in pairs)
            senders = Counter(nodes[rank] for rank in source.devices)
            if senders.keys().isdisjoint(nodes[rank] for rank in target.devices):
                most = max(senders.values())
                found = frozenset(used_by(link, most) for link in found)
            self._links[key] = found
        return self._links[key]

    def schedule(self, table: ScheduleTable) -> Schedule:
        """The parsed table."""
        key = (table.name, *table.rows)
        if key not in self._schedules:
            self._schedules[key] = table.parse()
        return self._schedules[key]

    def block(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, mode: Mode = False
    ) -> BlockCost:
        """Cost of one micro-batch of the block; equal for all blocks of its pattern."""
        blocks = self.captured if spot.captured else self.blocks
        if isinstance(mode, tuple):
            return blocks.kept(block, layout, replace(spot, joined=False), mode)
        cost = blocks.cost(block, layout, spot)
        return cost.recomputed() if mode else cost

    def stage(
        self,
        blocks: Sequence[Block],
        layouts: Mapping[str, BlockLayout],
        modes: Sequence[Mode],
        spot: BlockSpot,
    ) -> StageCost:
        """Cost of one micro-batch of a run of blocks. `layouts`: by pattern, with `(prelude)`."""
        patterns = sorted({block.pattern for block in blocks})
        key = (blocks[0].name, blocks[-1].name, tuple(modes), spot,
               *(self.blocks.layout_key(layouts[p]) for p in patterns))  # fmt: skip
        if key not in self._stages:
            self._stages[key] = self._sum(blocks, layouts, modes, spot)
        return self._stages[key]

    def _sum(
        self,
        blocks: Sequence[Block],
        layouts: Mapping[str, BlockLayout],
        modes: Sequence[Mode],
        spot: BlockSpot,
    ) -> StageCost:
        costs = self._each(blocks, layouts, modes, spot)
        kept: dict[str, int] = {}
        first: dict[str, int] = {}
        params: dict[str, int] = {}
        roots = self.facts.roots
        for index, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
            for names, sizes in (
                (block.inputs, cost.saved_inputs), (block.outputs, cost.saved_outputs)
            ):  # fmt: skip
                for name, nbytes in zip(names, sizes, strict=True):
                    root = roots[name]
                    if root not in kept:
                        kept[root], first[root] = nbytes, index
                    elif nbytes > kept[root]:
                        kept[root] = nbytes
            params.update(zip(block.params, cost.param_bytes, strict=True))
        prelude = self._prelude(blocks, layouts.get(PRELUDE), spot)
        params = dict(prelude.state) | params
        for name in self.facts.prelude_values & set(kept):
            del kept[name]
        saved = [c.saved_bytes for c in costs]
        passing, keepers = self._passing(blocks, costs, modes, spot, prelude, kept)
        gone = {value.name for value in passing}
        entering, released = [0] * len(blocks), [0] * len(blocks)
        goes = set[str]() if spot.captured else _released(blocks, costs, roots)
        read = _read_by(blocks, costs, roots, {k: n for k, n in kept.items() if k not in goes})
        for name, nbytes in prelude.made:
            if name not in gone:
                # It goes with the backward of the first block that keeps it, and is there from the
                # beginning.
                keeper = keepers.get(name, 0)
                saved[keeper] += nbytes
                entering[keeper] += nbytes
                released[keeper] += nbytes * (name in goes)
                if keeper:
                    passing.append(Passing(name, nbytes, 0, keeper - 1))
        for root, nbytes in kept.items():
            saved[first[root]] += nbytes
            released[first[root]] += nbytes * (root in goes)
            if root in {roots[name] for name in blocks[first[root]].inputs}:
                entering[first[root]] += nbytes
                if first[root]:  # what comes from other stages is there from the beginning
                    passing.append(Passing(root, nbytes, 0, first[root] - 1))
        return StageCost(
            forward_s=sum([c.forward_s for c in costs]) + prelude.forward_s,
            backward_input_s=sum([c.backward_input_s for c in costs]),
            backward_weight_s=sum([c.backward_weight_s for c in costs]),
            comm_forward_s=sum([c.comm_forward_s for c in costs]),
            comm_backward_s=sum([c.comm_backward_s for c in costs]),
            saved_bytes=sum(saved),
            params={name: nbytes for name, nbytes in params.items() if nbytes},
            summed_over=_summed_over(blocks, costs),
            workspace_bytes=max([c.workspace_bytes + c.remade_bytes for c in costs]),
            source=worst_source([c.source for c in costs]),
            uncertain_s=sum([c.uncertain_s for c in costs]),
            blocks=tuple(costs),
            block_saved=tuple(saved),
            block_released=tuple(released),
            kept=tuple(kept.items()),
            block_entering=tuple(entering),
            block_read=read,
            block_passing=_passing_by_block(passing, len(blocks)),
            block_waiting=waiting_bytes(
                self._last_readers, self.block_index[blocks[0].name], blocks, costs
            ),
        )

    def _passing(
        self,
        blocks: Sequence[Block],
        costs: Sequence[BlockCost],
        modes: Sequence[Mode],
        spot: BlockSpot,
        prelude: PreludeCost,
        kept: Mapping[str, int],
    ) -> tuple[list[Passing], Mapping[str, int]]:
        """What blocks read and none keeps (`kept`: bytes): values without a gradient, and those of
        the prelude; and of what is kept, which block is the first to keep it. A block that runs
        again, or part of it, keeps what it reads; so does a recording."""
        found: dict[str, Passing] = {}
        made: dict[str, int] = {}
        roots, sizes, stays = self.facts.roots, dict(prelude.made), dict[str, int]()
        unkept = {root for root, nbytes in kept.items() if not nbytes} | sizes.keys()
        # The search asks for many stages: blocks of which all is kept take no calls here.
        for index, (block, cost, mode) in enumerate(zip(blocks, costs, modes, strict=True)):
            for position, name in enumerate(block.inputs):
                root = roots[name]
                if root not in unkept or root in stays:
                    continue
                again = (mode and cost.backward_s > 0) or spot.captured
                passes = cost.passes and cost.passes[position]
                if again or (root in sizes and not passes):
                    stays[root] = index
                    continue
                begin = found[root].first if root in found else made.get(root, -1) + 1
                nbytes = sizes.get(root, cost.input_bytes[position])
                found[root] = Passing(root, nbytes, begin, index)
            for name in block.outputs:
                if roots[name] in unkept:
                    made[roots[name]] = index
        tensors = self.graph.tensors
        passing = [
            value for root, value in found.items()
            if root not in stays and tensors[root].kind is Kind.ACTIVATION
        ]  # fmt: skip
        return passing, stays

    def _each(
        self,
        blocks: Sequence[Block],
        layouts: Mapping[str, BlockLayout],
        modes: Sequence[Mode],
        spot: BlockSpot,
    ) -> list[BlockCost]:
        """Of each block; those that are alike are looked up once."""
        known: dict[object, BlockCost] = {}
        found: list[BlockCost] = []
        for block, mode in zip(blocks, modes, strict=True):
            key = block.pattern, self.facts.fed(block), mode
            if key not in known:
                known[key] = self.block(block, layouts[block.pattern], spot, mode)
            found.append(known[key])
        return found

    def _prelude(
        self, blocks: Sequence[Block], layout: BlockLayout | None, spot: BlockSpot
    ) -> PreludeCost:
        used = {name for block in blocks for name in block.inputs}
        needed = self.facts.prelude_values & used
        if layout is None or not needed:
            return PreludeCost()
        key = self.blocks.layout_key(layout), needed, spot
        if key not in self._preludes:
            site = self.blocks.site(spot)
            self._preludes[key] = price_prelude(self.facts, layout, needed, site)
        return self._preludes[key]

    def crossing(self, block: int) -> tuple[str, ...]:
        """Names of the values that cross into block number `block`."""
        before = {n for b in self.graph.blocks[:block] for n in b.outputs}
        after = {n for b in self.graph.blocks[block:] for n in b.inputs}
        return tuple(sorted(before & after))

    def border_bytes(self, block: int, *, back: bool = False) -> tuple[int, int]:
        """What crosses into block number `block`: bytes of one global batch, and bytes that do not
        depend on the batch; `back`: of the gradients of that."""
        key = block, back
        if key not in self._borders:
            crossing = [self.graph.tensors[n] for n in self.crossing(block)]
            sizes = {t: t.numel * DTYPE_BYTES[self.facts.dtypes[t.name]] for t in crossing
                     if t.kind is Kind.ACTIVATION and (t.requires_grad or not back)}  # fmt: skip
            batch = self.graph.batch_size
            split = {t for t in sizes if any(size and size % batch == 0 for size in t.shape)}
            self._borders[key] = (
                sum(sizes[t] for t in split),
                sum(size for t, size in sizes.items() if t not in split),
            )
        return self._borders[key]


def _released(
    blocks: Sequence[Block], costs: Sequence[BlockCost], roots: Mapping[str, str]
) -> set[str]:
    """Values that come into blocks, of which none keeps anything for the second half of its
    backward."""
    # Searches ask for many stages: a block takes no calls here.
    goes: dict[str, bool] = {}
    stays: dict[str, bool] = {}
    for block, cost in zip(blocks, costs, strict=True):
        released = cost.released_inputs
        for index, name in enumerate(block.inputs):
            if released and released[index]:
                goes[roots[name]] = True
            else:
                stays[roots[name]] = True
        for name, nbytes in zip(block.outputs, cost.saved_outputs, strict=True):
            if nbytes:
                stays[roots[name]] = True
    return goes.keys() - stays.keys()


def _summed_over(blocks: Sequence[Block], costs: Sequence[BlockCost]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for block, cost in zip(blocks, costs, strict=True):
        if not any(cost.summed_over):
            continue
        for name, axes in zip(block.params, cost.summed_over, strict=True):
            if axes:
                found[name] = found[name].union(axes) if name in found else frozenset(axes)
    return found
