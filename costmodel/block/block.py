"""Cost of one block on one rank: its ops at local shapes, and the conversions between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.costmodel.block.backward_room import backward_room
from meshwright.costmodel.block.clock import BlockSums, Tape
from meshwright.costmodel.block.forward_room import forward_room
from meshwright.costmodel.block.price_ops import GraphFacts, StageSite, Walk, Where
from meshwright.costmodel.block.reprice import OpStep, SavedKey
from meshwright.costmodel.block.site import USUAL
from meshwright.costmodel.block.split_room import SplitRoom, split_room
from meshwright.costmodel.comm.comm import group_levels
from meshwright.costmodel.ops.compute import OpTimer, worst_source
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import Source
from meshwright.ir.graph.graph import Block, Graph, Kind, Op
from meshwright.ir.layout.layout import (
    RP,
    Axis,
    R,
    Shard,
    Strategy,
    parse_placement,
    parse_strategy,
)
from meshwright.ir.plan.plan import BlockLayout, param_key
from meshwright.ir.precision import precision as known_precision


class Eased(NamedTuple):
    """How a backward differs from another."""

    eased_bytes: int
    """By which it needs less."""
    late_bytes: int
    """Its own `BlockCost.late_bytes`."""
    adding_bytes: int | None
    """Its own `BlockCost.adding_bytes`."""


NOT_EASED = Eased(0, 0, None)


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One micro-batch through one block on one rank. Times include communication."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    comm_forward_s: float
    """Of the forward; conversions on any axis."""
    comm_backward_s: float
    saved_bytes: int
    """What autograd keeps of values made inside the block that do not leave it."""
    saved_inputs: tuple[int, ...]
    """Bytes per `Block.inputs` that must stay alive for the backward; 0 if not needed."""
    saved_outputs: tuple[int, ...]
    """The same per `Block.outputs`."""
    input_bytes: tuple[int, ...]
    """Local size of each of `Block.inputs`."""
    output_bytes: tuple[int, ...]
    given_bytes: int
    """Gradients of its outputs, with which its backward begins."""
    param_bytes: tuple[int, ...]
    """Local size per `Block.params` as the optimizer steps them, though blocks may read narrower
    copies; of others as they are read, and 0 for constants."""
    param_shapes: tuple[tuple[int, ...], ...]
    """Local shape of each of `Block.params`."""
    summed_over: tuple[tuple[str, ...], ...]
    """Per `Block.params`: the model axes that its gradient is summed over once per step."""
    workspace_bytes: int
    """Largest operands and results of one op."""
    flops: float
    source: Source
    uncertain_s: float = 0.0
    """Seconds times relative error, summed over forward and backward with communication."""
    no_grad_s: float | None = None
    """The forward where nothing is kept, if it was measured."""
    accumulate_s: float = 0.0
    """Of `backward_weight_s`, if it was measured: adding to gradients that are there already."""
    split_s: float = 0.0
    """If it was measured: what a backward in two halves takes more than a whole one."""

    halved_bytes: int = 0
    """Kept from the first half of a split backward to the second, beside what a forward kept:
    gradients, and what was made again; less than 0 if more goes of what the forward kept."""
    leaving: Eased = NOT_EASED
    """Of its backward, where nobody else has what leaves it: that goes as its ops are through."""
    forward_bytes: int = 0
    """Most at once in its forward of what is made inside it, where all is kept."""
    halving_bytes: int | None = None
    """Most at once in the first half, beside what was kept and what it leaves to the second; None:
    not known."""
    second_bytes: int | None = None
    """Most in the second half, beside what it begins with and gradients of its parameters; None: as
    in a whole backward."""
    second_adding_bytes: int | None = None
    """By which it is more where these are added to those that are there; None: not known."""
    second_late_bytes: int = 0
    """By which it is less where there are none before."""
    released_bytes: int = 0
    """Of `saved_bytes`, what goes with the first half."""
    released_outputs: int = 0
    """The same of `saved_outputs`, where nobody else has them."""
    released_inputs: tuple[bool, ...] = ()
    """Per `Block.inputs`, whether of `saved_inputs` nothing is there after the first half; empty:
    it all is."""
    again_s: float = 0.0
    """Of `backward_input_s`: computing the forward again; its communication is not part of it."""
    tail_s: float = 0.0
    """Of the forward, what is not run again where a stack stops early (`Style.stops_early`)."""
    comm_tail_s: float = 0.0
    """Of it, communication."""
    remade_bytes: int = 0
    """What is made again, or made what it was, for the backward, beside `workspace_bytes`; it goes
    as what is kept does."""
    moved_bytes: int = 0
    """To the host and back; no part of `saved_bytes`, but where host and device are one."""

    scattered_bytes: int = 0
    """Of whole values that forward reduce-scatters read."""
    behind_s: float = 0.0
    """What its forward leaves to the device once the CPU has dispatched all of it."""
    freed_bytes: int = 0
    """Of what the block makes, what is there until it has run, as after that it is held in less."""
    eased_bytes: int = 0
    """By which its backward needs less than `workspace_bytes` beside what was saved; below 0: more,
    of what is there inside backwards alone."""
    late_bytes: int = 0
    """By which it needs less than that where there are no gradients of its parameters before, of
    which all count as there."""
    adding_bytes: int | None = None
    """By which it needs more where gradients of its parameters are added to those that are there;
    None: not known."""
    passes: tuple[bool, ...] = ()
    """Per `Block.inputs`, whether it is a value of the prelude that its ops read and none keeps, as
    autocast has cast it; empty: not known."""
    logits: int = 0
    """Most that a loss reads of a micro-batch."""
    turned_bytes: int = 0
    """Of copies that it keeps of what it reads, where that has come in a message."""
    most_at: float = 0.0
    """Share of its backward's time after which there is most at once."""

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    @property
    def backward_bytes(self) -> int:
        """Most at once in its backward beside what was saved."""
        return self.workspace_bytes + self.remade_bytes - self.eased_bytes

    @property
    def kept_outputs(self) -> int:
        """Bytes of what leaves it that it saves as it leaves."""
        pairs = zip(self.saved_outputs, self.output_bytes, strict=True)
        return sum([min(pair) for pair in pairs])

    def halving_again(self, halved_bytes: int, there: int = 0) -> int | None:
        """`halving_bytes` where the first half makes things again, and leaves so much to the
        second. `there`: bytes that the forward kept, of what a block saves."""
        if self.halving_bytes is None:
            return None
        made = self.forward_bytes + self.given_bytes - halved_bytes - there
        return max(self.halving_bytes, made)

    def left_alone(self) -> "BlockCost":
        """The same block where nobody else has what leaves it."""
        if self.leaving is NOT_EASED:
            return self
        less, more = self.leaving, self.released_outputs
        return replace(
            self, eased_bytes=self.eased_bytes + less.eased_bytes, late_bytes=less.late_bytes,
            adding_bytes=less.adding_bytes, halved_bytes=self.halved_bytes - more,
            halving_bytes=None if self.halving_bytes is None else self.halving_bytes + more,
            leaving=NOT_EASED, released_outputs=0,
        )  # fmt: skip

    @property
    def _total_s(self) -> float:
        return self.forward_s + self.backward_s

    def recomputed(self) -> "BlockCost":
        """The same block when it keeps only its inputs and runs its forward again; one without a
        backward keeps nothing anyway."""
        return self._recomputed if self.backward_s else self

    @cached_property
    def _recomputed(self) -> "BlockCost":
        remade_s = max(0.0, self.forward_s - self.tail_s)
        comm_remade_s = max(0.0, self.comm_forward_s - self.comm_tail_s)
        alone = self.left_alone()
        halved_bytes = alone.halved_bytes + self.saved_bytes + sum(self.saved_outputs)
        return replace(
            alone,
            forward_s=self.forward_s if self.no_grad_s is None else self.no_grad_s,
            backward_input_s=self.backward_input_s + remade_s,
            comm_backward_s=self.comm_backward_s + comm_remade_s,
            again_s=max(0.0, remade_s - comm_remade_s),
            saved_bytes=0,
            saved_inputs=self.input_bytes,
            released_inputs=(),
            saved_outputs=(0,) * len(self.saved_outputs),
            remade_bytes=self.remade_bytes + self.saved_bytes + sum(self.saved_outputs),
            halved_bytes=halved_bytes,
            halving_bytes=alone.halving_again(halved_bytes),
            forward_bytes=0,
            uncertain_s=self.uncertain_s * (1 + remade_s / max(1e-12, self._total_s)),
        )


def placements(named: Mapping[str, str]) -> Where:
    """Axis -> placement from its text."""
    return {axis: parse_placement(text) for axis, text in named.items()}


def _strategies(layout: BlockLayout, op: Op) -> dict[str, Strategy]:
    named = layout.ops.get(op.key, {})
    return {axis: parse_strategy(text) for axis, text in named.items()}


def block_cost(
    graph: Graph,
    block: Block,
    layout: BlockLayout,
    *,
    axes: Mapping[str, Axis],
    coordinates: Mapping[str, int],
    groups: Mapping[str, Sequence[int]],
    cluster: Cluster,
    precision: str,
    recompute: bool = False,
    timer: OpTimer | None = None,
) -> BlockCost:
    """Cost of one micro-batch of `block` on the rank at `coordinates`.

    `groups`: global ranks of the rank's line on each of `axes`, itself included. For many blocks
    `costmodel.cost_cache.CostTables` shares the work.
    """
    rank = groups["dp"][coordinates["dp"]]
    levels = {axis: group_levels(groups[axis], cluster) for axis in axes}
    site = StageSite(axes, coordinates, cluster.device(rank), levels)
    facts = GraphFacts.of(graph, known_precision(precision), site.device.kind)
    cost = price_block(facts, block, layout, site, timer)
    return cost.recomputed() if recompute else cost


def price_block(
    facts: GraphFacts,
    block: Block,
    layout: BlockLayout,
    site: StageSite,
    timer: OpTimer | None = None,
) -> BlockCost:
    """`block_cost` with what many blocks share already made."""
    return summary(walk_block(facts, block, layout, site, timer), block, layout)


def walk_block(
    facts: GraphFacts,
    block: Block,
    layout: BlockLayout,
    site: StageSite,
    timer: OpTimer | None = None,
) -> Walk:
    """A walk that has been through the whole block."""
    walk, ops, leaving = begin_walk(facts, block, layout, site, timer)
    for op, strategies in ops:
        walk.op(op, strategies)
    for name, where in zip(block.outputs, leaving, strict=True):
        walk.convert(name, where)
    walk.clock.settle(site.device)
    return walk


def begin_walk(
    facts: GraphFacts,
    block: Block,
    layout: BlockLayout,
    site: StageSite,
    timer: OpTimer | None = None,
) -> tuple[Walk, list[tuple[Op, dict[str, Strategy]]], list[Where]]:
    """A walk that stands before the block, the ops on its way, and how the outputs leave."""
    graph = facts.graph
    walk = Walk(facts, site, timer)
    for name, entry in zip(block.inputs, layout.inputs, strict=True):
        walk.placed[name] = placements(entry)
    ops = [(op, _strategies(layout, op)) for op in graph.block_ops(block)]
    walk.placed |= _stored(graph, block, layout, ops, site)
    leaving = []
    for name, leave in zip(block.outputs, layout.outputs, strict=True):
        whole = {"dp": leave["dp"]} if "dp" in leave else {}
        leaving.append(placements(whole if name == graph.loss else leave))
    return walk, ops, leaving


def _stored(
    graph: Graph,
    block: Block,
    layout: BlockLayout,
    ops: Sequence[tuple[Op, Mapping[str, Strategy]]],
    site: StageSite,
) -> dict[str, Where]:
    """How each parameter is stored, and what its gradient is where it is whole: a summand if that
    of any use is, and on dp always."""
    found: dict[str, Where] = {}
    for name in block.params:
        tensor = graph.tensors[name]
        splits = placements(layout.parameters.get(param_key(block, tensor.fqn or name), {}))
        split = {axis: p for axis, p in splits.items() if axis != "dp" and isinstance(p, Shard)}
        found[name] = {"dp": RP if tensor.requires_grad else R, **split}
    for op, strategies in ops:
        for axis, strategy in strategies.items():
            for name, wanted in zip(op.inputs, strategy.inputs, strict=True):
                if name in found and wanted == RP and graph.tensors[name].requires_grad:
                    found[name].setdefault(axis, RP)
    real = [axis for axis, line in site.axes.items() if line.size > 1]
    return {name: {a: where[a] for a in real if a in where} for name, where in found.items()}


def _summed_over(stored: Where) -> tuple[str, ...]:
    return tuple([axis for axis, placement in stored.items() if placement == RP and axis != "dp"])


def summary(walk: Walk, block: Block, layout: BlockLayout) -> BlockCost:
    """What a walk has found."""
    tensors = walk.facts.graph.tensors
    entries = [placements(place) for place in layout.inputs]
    exits = [placements(place) for place in layout.outputs]
    # A value that two blocks keep is one piece of memory: those at the borders are told apart.
    saved = dict(walk.saved)
    everything = sum(saved.values())
    entering = [
        max(_pop_saved(walk, saved, name, where), _left_at_border(walk, name, where))
        for name, where in zip(block.inputs, entries, strict=True)
    ]
    entered = everything - sum(saved.values())
    kept = dict(saved)
    leaving = [_pop_saved(walk, saved, n, w) for n, w in zip(block.outputs, exits, strict=True)]
    left = {key: nbytes for key, nbytes in kept.items() if key not in saved}
    exit_places = dict(zip(block.outputs, exits, strict=True))
    room = backward_room(walk, saved, exit_places)
    most = min(max(walk.in_backward, room.one_op), room.most)
    made = tuple([walk.nbytes(n, w) for n, w in zip(block.outputs, exits, strict=True)])
    cost = BlockCost(
        forward_s=walk.clock.forward_s,
        backward_input_s=walk.clock.backward_input_s,
        backward_weight_s=walk.clock.backward_weight_s,
        comm_forward_s=walk.clock.comm_forward_s,
        comm_backward_s=walk.clock.comm_backward_s,
        tail_s=walk.clock.tail_s * walk.site.run_as.stops_early,
        comm_tail_s=walk.clock.comm_tail_s * walk.site.run_as.stops_early,
        saved_bytes=sum(saved.values()),
        saved_inputs=tuple(entering),
        saved_outputs=tuple(leaving),
        input_bytes=tuple(
            [
                walk.nbytes(n, where) * (tensors[n].kind is Kind.ACTIVATION)
                for n, where in zip(block.inputs, entries, strict=True)
            ]
        ),
        output_bytes=made,
        given_bytes=sum(
            [
                nbytes
                for name, nbytes in zip(block.outputs, made, strict=True)
                if tensors[name].requires_grad
            ]
        ),
        param_bytes=tuple(
            [
                _stepped_bytes(walk, n) * (tensors[n].kind in (Kind.PARAMETER, Kind.BUFFER))
                for n in block.params
            ]
        ),
        param_shapes=tuple([walk.shape(n, walk.placed[n]) for n in block.params]),
        summed_over=tuple([_summed_over(walk.placed[name]) for name in block.params]),
        workspace_bytes=walk.workspace,
        eased_bytes=walk.workspace - most,
        late_bytes=most - room.growing,
        adding_bytes=room.adding,
        passes=tuple(_passes(walk, block)),
        logits=walk.logits,
        turned_bytes=sum([walk.turned.get(name, 0) for name in block.inputs]),
        most_at=room.at,
        flops=walk.flops,
        source=worst_source([walk.site.device.source, *walk.clock.sources]),
        uncertain_s=walk.clock.uncertain_s,
        scattered_bytes=walk.clock.scattered_bytes,
        behind_s=walk.clock.behind_s,
        forward_bytes=max(forward_room(walk, kept, block.inputs), walk.to_end - entered),
    )
    if left:
        alone = backward_room(walk, kept, exit_places)
        most_alone = min(most, alone.most)
        eased = Eased(most - most_alone, most_alone - alone.growing, alone.adding)
        cost = replace(cost, leaving=eased)
    return _in_halves(cost, block, split_room(walk, saved, left, block, exit_places))


def _in_halves(cost: BlockCost, block: Block, halves: SplitRoom) -> BlockCost:
    """The same with what the halves of its backward have."""
    return replace(
        cost, halved_bytes=halves.kept - halves.released,
        halving_bytes=halves.first - halves.kept + halves.released,
        second_bytes=halves.second, second_adding_bytes=halves.adding,
        second_late_bytes=halves.late,
        released_bytes=halves.released,
        released_outputs=halves.released_outputs,
        released_inputs=tuple([name in halves.leaves for name in block.inputs]),
    )  # fmt: skip


def _stepped_bytes(walk: Walk, name: str) -> int:
    tensor, copied = walk.facts.graph.tensors[name], walk.facts.precision.copied
    nbytes = walk.nbytes(name, walk.placed[name])
    copies = walk.facts.precision.copies
    is_copy = tensor.kind is Kind.PARAMETER and tensor.dtype == copies
    stepped = copied and is_copy and tensor.requires_grad
    return round(nbytes / copied) if stepped else nbytes


def at_links(cost: BlockCost, tape: Tape, site: StageSite) -> BlockCost:
    """A block's cost, as `summary` has it, where the links are others but nothing else is."""
    clock = BlockSums.of(tape, site)
    return replace(
        cost,
        forward_s=clock.forward_s,
        backward_input_s=clock.backward_input_s,
        backward_weight_s=clock.backward_weight_s,
        comm_forward_s=clock.comm_forward_s,
        comm_backward_s=clock.comm_backward_s,
        tail_s=clock.tail_s * site.run_as.stops_early,
        comm_tail_s=clock.comm_tail_s * site.run_as.stops_early,
        source=worst_source([site.device.source, *clock.sources]),
        uncertain_s=clock.uncertain_s,
        behind_s=clock.behind_s,
    )


def _pop_saved(walk: Walk, saved: dict[SavedKey, int], name: str, where: Where) -> int:
    """Take out of `saved` the memory of a value as it enters or leaves the block."""
    stored, target = walk.stored(name, where)
    return saved.pop((stored, walk.facts.dtypes[stored], target), 0)


def _left_at_border(walk: Walk, name: str, where: Where) -> int:
    """Bytes of a value that our runtime holds, as a leaf, until the block's backward has put its
    gradient there, whether an operator keeps it or not."""
    tensor = walk.facts.graph.tensors[name]
    ours = walk.site.run_as is USUAL and tensor.kind is Kind.ACTIVATION
    return walk.nbytes(name, where) if ours and tensor.requires_grad else 0


def _passes(walk: Walk, block: Block) -> Iterator[bool]:
    facts, kept = walk.facts, set[str]()
    for step in walk.script:
        if isinstance(step, OpStep):
            kept |= {facts.roots[tensor.memory[0]] for tensor in step.kept if not tensor.key}
    for name in block.inputs:
        yield name in facts.prelude_values and facts.roots[name] not in kept


class PreludeCost(NamedTuple):
    """Of the ops before all blocks that some of these need."""

    forward_s: float = 0.0
    made: tuple[tuple[str, int], ...] = ()
    """Values with bytes, of each micro-batch; what nobody but the prelude reads is gone."""
    state: tuple[tuple[str, int], ...] = ()
    """Buffers that they read, with bytes on a rank."""


def price_prelude(
    facts: GraphFacts, layout: BlockLayout, needed: frozenset[str], site: StageSite
) -> PreludeCost:
    """The cost of the prelude ops behind the `needed` values."""
    walk = Walk(facts, site, None)
    for name in facts.graph.inputs:
        batch = name in facts.graph.batch_inputs
        walk.placed[name] = {"dp": Shard(0)} if batch else {}
    wanted = set(needed)
    chosen = []
    for op in reversed(facts.graph.prelude_ops):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            chosen.append(op)
    for op in reversed(chosen):
        walk.op(op, _strategies(layout, op))
    made = {out for op in chosen for out in op.outputs if out}
    kept = sorted({facts.roots[name] for name in needed} & made)
    walk.clock.settle(site.device, of_block=False)
    tensors = facts.graph.tensors
    read = {n for op in chosen for n in op.inputs if n and tensors[n].kind is Kind.BUFFER}
    return PreludeCost(
        walk.clock.forward_s,
        tuple((n, walk.nbytes(n, walk.placed[n])) for n in kept),
        tuple((n, walk.nbytes(n, walk.placed.get(n, {}))) for n in sorted(read)),
    )
