"""Where the blocks of a plan convert what their ops read: what kernels that communicate look at."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.ir.graph.graph import Block, Graph, Op
from meshwright.ir.layout.conversions import Conversion, Primitive
from meshwright.ir.layout.layout import Axis, Layout, R, Strategy, parse_placement, parse_strategy
from meshwright.ir.layout.paths import path
from meshwright.ir.placed.found import FoundSpot
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage, param_key


@dataclass(frozen=True, slots=True)
class Read:
    """An operand of an op, and what it goes through to be as the op wants it."""

    op: Op
    index: int
    """Of the op's tensor inputs."""
    name: str
    moves: tuple[tuple[str, Conversion], ...]
    """Axis and conversion, those left out that do nothing."""

    @property
    def only(self) -> tuple[str, Conversion] | None:
        """The move, if there is one and no more."""
        return self.moves[0] if len(self.moves) == 1 else None


@dataclass(frozen=True, slots=True)
class KernelSpot:
    """An op that a kernel takes over with the collective beside it."""

    op: Op
    axis: str = ""
    conversion: Conversion | None = None
    index: int = 0
    """Of the input that is converted."""
    others: tuple[Op, ...] = ()
    """Ops that read the same converted value, and are part of the same call."""
    via: Op | None = None
    """A view, between the conversion and the op, of what only the op reads."""
    why: str = ""
    """Why it is not taken after all."""


@dataclass(frozen=True)
class LaidBlock:
    """A block as a stage has it: what its ops read, and how."""

    graph: Graph
    block: Block
    layout: BlockLayout
    axes: Mapping[str, Axis]

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.graph.block_ops(self.block)

    def strategies(self, op: Op) -> dict[str, Strategy]:
        found = self.layout.ops.get(op.key, {})
        return {axis: parse_strategy(text) for axis, text in found.items() if axis in self.axes}

    def reads(self) -> list[Read]:
        """All operands of all ops, in order."""
        known = self._known()
        found = []
        for op in self.ops:
            strategies = self.strategies(op)
            for i, name in enumerate(op.inputs):
                wanted = {axis: s.inputs[i] for axis, s in strategies.items()}
                found.append(Read(op, i, name, self._moves(name, known[name], wanted)))
            for i, name in enumerate(name for name in op.outputs if name):
                known[name] = {
                    axis: s.outputs[i] for axis, s in strategies.items() if i < len(s.outputs)
                }
        return found

    def leaves(self) -> frozenset[str]:
        """Values that other blocks read."""
        return frozenset(self.block.outputs)

    def _known(self) -> dict[str, Layout]:
        graph, block, layout = self.graph, self.block, self.layout
        known = {
            name: _parsed(placed) for name, placed in zip(block.inputs, layout.inputs, strict=True)
        }
        for name in block.params:
            fqn = graph.tensors[name].fqn
            stored = layout.parameters.get(param_key(block, fqn), {}) if fqn else {}
            known[name] = _parsed(stored)
        return known

    def _moves(self, name: str, now: Layout, wanted: Layout) -> tuple[tuple[str, Conversion], ...]:
        state, found = dict(now), []
        for axis, target in path(self.graph.tensors[name].shape, now, wanted, self.axes):
            conversion = Conversion(state.get(axis, R), target)
            state[axis] = target
            moves = {conversion.forward, conversion.backward}
            if self.axes[axis].size > 1 and moves != {Primitive.IDENTITY}:
                found.append((axis, conversion))
        return tuple(found)


def _parsed(placements: Mapping[str, str]) -> Layout:
    return {axis: parse_placement(text) for axis, text in placements.items()}


Look = Callable[[LaidBlock], Iterator[KernelSpot]]


def spots(plan: Plan, graph: Graph, stage: int, block: Block, look: Look) -> list[KernelSpot]:
    """What a look at a block of a stage finds, and what stands against it there."""
    at = plan.stages[stage]
    name = at.layouts.get(block.pattern)
    if name is None:
        return []
    axes = at.axes(plan.global_batch_size)
    return _kept(list(look(LaidBlock(graph, block, plan.layout(name), axes))), at, block)


def _kept(found: list[KernelSpot], stage: Stage, block: Block) -> list[KernelSpot]:
    if not stage.keeping(block):
        return found
    why = "the plan says op by op what the block keeps"
    return [KernelSpot(spot.op, why=spot.why or why) for spot in found]


Known = dict[tuple[Any, ...], tuple[list[KernelSpot], BlockLayout]]
"""What looks at blocks have found: by look, block, layout (kept, so that it stays the one of its
number) and axes."""


def everywhere(
    plan: Plan, graph: Graph, look: Look, known: Known
) -> Iterator[tuple[FoundSpot, int]]:
    """The same of all blocks of all stages, and how many there are of each; equal blocks are looked
    at once."""
    for index, stage in enumerate(plan.stages):
        axes = stage.axes(plan.global_batch_size)
        alike: dict[tuple[str, bool], list[Block]] = {}
        for block in plan.stage_blocks(graph, index):
            keeps = bool(stage.saved and stage.keeping(block))
            alike.setdefault((block.pattern, keeps), []).append(block)
        first = {pattern: blocks[0] for (pattern, _), blocks in reversed(alike.items())}
        for (pattern, _), blocks in alike.items():
            name = stage.layouts.get(pattern)
            if name is None:
                continue
            layout, block = plan.layout(name), first[pattern]
            key = look, block.name, id(layout), tuple(axes.items())
            if key not in known:
                known[key] = list(look(LaidBlock(graph, block, layout, axes))), layout
            for spot in _kept(known[key][0], stage, blocks[0]):
                where = f"{pattern}.{spot.op.key}"
                yield FoundSpot(where, spot.why, index, block.name, spot.op.key), len(blocks)
