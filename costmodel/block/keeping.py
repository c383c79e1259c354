"""What a policy on a block's values (`ir.plan.keeping`) changes of its cost.

It follows `runtime.stage.keeping`: a value that the backward needs belongs to the op that made its
memory; what is made again runs before the backward of the block, with all that lies behind it up to
what is held; what enters or leaves the block stays. What is held otherwise changes when the block
has run, and changes back before its backward: in between there is what its form says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.costmodel.block.block import BlockCost, begin_walk
from meshwright.costmodel.block.forward_room import forward_room
from meshwright.costmodel.block.price_ops import GraphFacts, StageSite, Walk, Where
from meshwright.costmodel.block.reprice import SavedKey
from meshwright.costmodel.ops.compute import OpTimer
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.forms.retaining import Footprint
from meshwright.forms.retention import KEEP, of_block, retention
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Block, Kind, Op
from meshwright.ir.layout.layout import Placement, Strategy
from meshwright.ir.plan.keeping import Keeping, keeping_of, operands_key
from meshwright.ir.plan.plan import BlockLayout

Policy = tuple[tuple[str, Keeping], ...]
"""A policy that can be looked up."""
Storage = tuple[str, tuple[Placement, ...]]
"""A value that has its own memory, and its placement."""


@dataclass(frozen=True, slots=True)
class OpMemories:
    """An op of a block, and the memories that it reads."""

    op: Op
    strategies: Mapping[str, Strategy]
    reads: tuple[Storage, ...]

    def where(self, index: int) -> Where:
        """How it wants an operand."""
        return {axis: strategy.inputs[index] for axis, strategy in self.strategies.items()}


@dataclass(slots=True)
class Makers:
    """A block's walk, with who makes and who keeps what."""

    walk: Walk
    parts: dict[str, OpMemories] = field(default_factory=dict)
    """By `Op.key`, in order."""
    made: dict[Storage, str] = field(default_factory=dict)
    """Memory -> key of its maker."""
    brought: dict[Storage, list[tuple[str, tuple[Placement, ...]]]] = field(default_factory=dict)
    """Memory of a converted value -> the conversions that lead there."""
    saver: dict[SavedKey, str] = field(default_factory=dict)
    """`Op.key` of the first that keeps it."""
    cost_s: dict[str, float] = field(default_factory=dict)
    """Key of a maker -> what its forward takes."""
    staying: frozenset[Storage] = frozenset()
    """What enters or leaves the block."""
    entering: frozenset[Storage] = frozenset()

    def maker(self, key: SavedKey) -> str:
        """Of what is kept; an op makes itself what it keeps besides values, and casts."""
        name, dtype, target = key
        if not target or dtype != self.walk.facts.dtypes[name]:
            return self.saver[key]
        return "" if (name, target) in self.staying else self.made.get((name, target), "")

    def inside(self, storage: Storage) -> str:
        """Who makes a memory that does not stay anyway; empty if it does."""
        return "" if storage in self.staying else self.made.get(storage, "")


def makers_of(
    facts: GraphFacts,
    block: Block,
    layout: BlockLayout,
    site: StageSite,
    timer: OpTimer | None = None,
) -> Makers:
    """Walks a block once more."""
    walk, ops, leave = begin_walk(facts, block, layout, site, timer)
    found = Makers(walk)
    entering = {walk.stored(name, walk.placed[name]) for name in block.inputs}
    for op, strategies in ops:
        _note(found, op, strategies)
    leaving = {walk.stored(name, where) for name, where in zip(block.outputs, leave, strict=True)}
    found.staying, found.entering = frozenset(entering | leaving), frozenset(entering)
    walk.clock.settle(site.device)
    return found


def _note(found: Makers, op: Op, strategies: Mapping[str, Strategy]) -> None:
    walk = found.walk
    converted, saved = set(walk.converted), set(walk.saved)
    part = OpMemories(op, strategies, ())
    before = _spent(walk)
    for i, name in enumerate(op.inputs):
        walk.convert(name, part.where(i))
    between = _spent(walk)
    walk.op(op, strategies)
    found.cost_s[operands_key(op.key)] = max(b - a for a, b in zip(before, between, strict=True))
    found.cost_s[op.key] = max(b - a for a, b in zip(between, _spent(walk), strict=True))
    reads = tuple(walk.stored(name, part.where(i)) for i, name in enumerate(op.inputs))
    found.parts[op.key] = replace(part, reads=reads)
    for name in op.outputs:
        if name and walk.facts.roots[name] == name:
            found.made[walk.stored(name, walk.placed[name])] = op.key
    for name, target in walk.converted - converted:
        where = dict(zip(walk.site.axes, target, strict=True))
        storage = walk.stored(name, where)
        if storage != walk.stored(name, walk.placed[name]) and storage not in found.made:
            found.made[storage] = operands_key(op.key)
        found.brought.setdefault(storage, []).append((name, target))
    found.saver |= dict.fromkeys(walk.saved.keys() - saved, op.key)


def _spent(walk: Walk) -> tuple[float, float]:
    """Seconds of the forward so far, on the device and of dispatch."""
    return walk.clock.forward_s, walk.clock.forward_dispatch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a policy changes of one micro-batch."""

    again_s: float
    again_comm_s: float
    """Of it, communication."""
    remade_bytes: int
    """Not kept, and there again for the backward."""
    moved_bytes: int
    """To the host and back."""
    freed_bytes: int
    """What holding it otherwise frees, besides what is moved."""
    copied_bytes: int
    """Read and written to hold it otherwise, and as much to undo that."""
    copies: int
    """Memories of which that is."""
    held_bytes: int
    """Kept only for what is made again."""
    held: frozenset[str]
    """Values that enter or leave the block and are kept for that."""


def effect(makers: Makers, policy: Policy) -> Effect:
    """Of a policy on one block."""
    said = {key: keeping_of(dict(policy), key) for key in {*makers.made.values(), *makers.parts}}
    said[""] = KEEP
    behind, remade, held = _Behind(makers, said), 0, _Otherwise()
    for key, nbytes in makers.walk.saved.items():
        form = retention(said[makers.maker(key)])
        if form.again:
            behind.want_saved(key)
            remade += nbytes
        else:
            held.add(form.describe(_dtype(key)), nbytes)
    again = behind.priced()
    only_for_others = behind.held_bytes()
    return Effect(
        again_s=again.clock.forward_s,
        again_comm_s=again.clock.comm_forward_s,
        remade_bytes=remade,
        moved_bytes=held.moved_bytes + only_for_others.moved_bytes,
        freed_bytes=held.nbytes - held.held_bytes - held.moved_bytes,
        copied_bytes=held.copied_bytes + only_for_others.copied_bytes,
        copies=held.copies + only_for_others.copies,
        held_bytes=only_for_others.held_bytes,
        held=frozenset(name for name, target in behind.held & makers.staying),
    )


def _dtype(key: SavedKey) -> str:
    """Of what is kept; what an op keeps besides values is bytes."""
    return key[1] if key[1] in DTYPE_BYTES else "uint8"


@dataclass(slots=True)
class _Otherwise:
    """Sums over memories that are held, as they are or otherwise."""

    nbytes: int = 0
    held_bytes: int = 0
    moved_bytes: int = 0
    copied_bytes: int = 0
    copies: int = 0

    def add(self, of: Footprint, nbytes: int) -> None:
        """Count a memory."""
        self.nbytes += nbytes
        self.held_bytes += round(of.held * nbytes)
        self.moved_bytes += round(of.moved * nbytes)
        self.copied_bytes += round(of.copied * nbytes)
        self.copies += of.copied > 0


@dataclass(slots=True)
class _Behind:
    """What runs again for some values, and what is held for that."""

    makers: Makers
    said: Mapping[str, Keeping]
    ops: set[str] = field(default_factory=set)
    brought: set[Storage] = field(default_factory=set)
    held: set[Storage] = field(default_factory=set)

    def want_saved(self, key: SavedKey) -> None:
        name, _, target = key
        if target and self.makers.inside((name, target)) == self.makers.maker(key):
            self.want((name, target))
        else:
            self.want_op(self.makers.maker(key))

    def want(self, storage: Storage) -> None:
        maker = self.makers.inside(storage)
        if not retention(self.said[maker]).again:
            self.held.add(storage)
        elif maker in self.makers.parts:
            self.want_op(maker)
        elif storage not in self.brought:
            self.brought.add(storage)
            walk, name = self.makers.walk, storage[0]
            self.want(walk.stored(name, walk.placed[name]))

    def want_op(self, key: str) -> None:
        if key not in self.ops:
            self.ops.add(key)
            for storage in self.makers.parts[key].reads:
                self.want(storage)

    def priced(self) -> Walk:
        """A walk through what runs again; only its forward counts."""
        full = self.makers.walk
        again = {way for storage in self.brought for way in self.makers.brought.get(storage, ())}
        walk = Walk(full.facts, full.site, full.timer)
        walk.placed, walk.storage = dict(full.placed), dict(full.storage)
        walk.converted = full.converted - again
        for key, part in self.makers.parts.items():
            if key in self.ops:
                walk.op(part.op, part.strategies)
                continue
            for i, storage in enumerate(part.reads):
                if storage in self.brought and self.makers.made[storage] == operands_key(key):
                    walk.convert(part.op.inputs[i], part.where(i))
        walk.clock.settle(full.site.device, of_block=False)
        return walk

    def held_bytes(self) -> _Otherwise:
        """What is held besides what is kept anyway."""
        walk, found = self.makers.walk, _Otherwise()
        kept = {(name, target) for name, dtype, target in walk.saved
                if target and dtype == walk.facts.dtypes[name]}  # fmt: skip
        for name, target in self.held - kept - self.makers.staying:
            is_activation = walk.facts.graph.tensors[name].kind is Kind.ACTIVATION
            if is_activation and name not in walk.facts.prelude_values:
                where = dict(zip(walk.site.axes, target, strict=True))
                form = retention(self.said[self.makers.inside((name, target))])
                found.add(form.describe(walk.facts.dtypes[name]), walk.nbytes(name, where))
        return found


def kept_cost(cost: BlockCost, block: Block, makers: Makers, policy: Policy) -> BlockCost:
    """The cost of a block (as it was measured, if it was) under a policy."""
    if of_block(policy):
        return cost.recomputed()
    found, clock = effect(makers, policy), makers.walk.clock
    own_s = clock.forward_s - clock.comm_forward_s
    scale = (cost.forward_s - cost.comm_forward_s) / own_s if own_s else 1.0
    again_s = (found.again_s - found.again_comm_s) * scale
    away = found.moved_bytes if makers.walk.site.device.is_apart else 0
    copy_s = _copy_s(found, makers.walk.site.device)
    extra_s = again_s + found.again_comm_s + copy_s
    halved_bytes, halving_bytes = cost.halved_bytes, cost.halving_bytes
    if again := found.remade_bytes + found.freed_bytes:
        # Of what goes with the first half, some was made again for it: that goes, too. What is held
        # for making things again goes once they are made.
        halved_bytes += again - found.held_bytes
        there = cost.saved_bytes - again
        halving_bytes = cost.halving_again(halved_bytes, there)
    most = cost.workspace_bytes - cost.eased_bytes
    forward_bytes = _forward_bytes(makers, block, policy) if found.remade_bytes else None
    return replace(
        cost,
        forward_s=cost.forward_s + copy_s,
        backward_input_s=cost.backward_input_s + extra_s,
        comm_backward_s=cost.comm_backward_s + found.again_comm_s,
        again_s=again_s,
        saved_bytes=max(
            0,
            cost.saved_bytes - found.remade_bytes - found.freed_bytes - away + found.held_bytes,
        ),
        released_inputs=(),
        saved_inputs=_held(makers, found, block.inputs, cost.saved_inputs, cost.input_bytes),
        saved_outputs=_held(makers, found, block.outputs, cost.saved_outputs, cost.output_bytes),
        remade_bytes=found.remade_bytes + found.freed_bytes,
        moved_bytes=found.moved_bytes,
        freed_bytes=found.freed_bytes,
        forward_bytes=cost.forward_bytes if forward_bytes is None else forward_bytes,
        eased_bytes=cost.eased_bytes + min(found.held_bytes, max(0, most)),
        halved_bytes=halved_bytes,
        halving_bytes=halving_bytes,
        uncertain_s=cost.uncertain_s * (1 + extra_s / max(1e-12, cost.forward_s + cost.backward_s)),
    )


def _forward_bytes(makers: Makers, block: Block, policy: Policy) -> int:
    """Most at once in the forward, which keeps nothing of what is made again."""
    said = {key: keeping_of(dict(policy), key) for key in {*makers.made.values(), *makers.parts}}
    again = {key for key, keeping in said.items() if retention(keeping).again}
    walk = makers.walk
    kept = {
        key: nbytes
        for key, nbytes in walk.saved.items()
        if (key[0], key[2]) not in makers.entering and makers.maker(key) not in again
    }
    return forward_room(walk, kept, block.inputs, again)


def _copy_s(found: Effect, device: DeviceType) -> float:
    """Seconds of holding memories otherwise; of undoing it as many."""
    curve = curve_of(OpClass.COPY, device)
    return found.copies * curve.floor_s + memory_s(found.copied_bytes, curve, device)


def _held(
    makers: Makers,
    found: Effect,
    names: tuple[str, ...],
    saved: tuple[int, ...],
    whole: tuple[int, ...],
) -> tuple[int, ...]:
    roots = makers.walk.facts.roots
    return tuple(
        max(kept, nbytes) if roots[name] in found.held or name in found.held else kept
        for name, kept, nbytes in zip(names, saved, whole, strict=True)
    )
