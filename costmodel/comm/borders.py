"""What crosses the borders between stages: bytes of each rank, and conversions on the way.

Blocks are priced as their layouts declare what enters and leaves them. Where a value comes to a
block otherwise, or has to be whole to cross a border, one more conversion stands between.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from meshwright.costmodel.block.block import placements
from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.comm.comm import Levels, collective_time, send_time
from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.ir.graph.graph import DTYPE_BYTES, Kind
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.crossing import Crossing, crossings, same_on_model
from meshwright.ir.layout.layout import Axis, Placement, R, Shard, local_shape
from meshwright.ir.memo import Memo
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, Plan, Stage

_TENSOR = "tp"
_Placed = tuple[tuple[str, Placement], ...]
_Change = tuple[str, _Placed, _Placed]
"""A value, how it is placed, and how it is needed."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Conversions of one micro-batch between the blocks of a stage and on its way in and out."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    uncertain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OneWay:
    """One rank's part of what crosses a border in one direction."""

    whole_bytes: int = 0
    """For one global batch on one data parallel rank."""
    fixed_bytes: int = 0
    """The same of what does not depend on the batch."""
    alike_bytes: int = 0
    """Of `whole_bytes`, what ranks of tensor parallelism have alike."""


@dataclass(frozen=True, slots=True)
class Borders:
    """Of one stage."""

    changes: tuple[_Change, ...]
    ahead: OneWay
    """Of what leaves."""
    back: OneWay
    """Of the gradients of that: not all values have one."""


_last: Memo[None, tuple[Plan, tuple[Borders, ...]]] = Memo()
_known: Memo[tuple[object, ...], tuple[Borders, ...]] = Memo()
_passages: Memo[tuple[tuple[_Change, ...], BlockSpot], Passage] = Memo()


def borders(tables: CostTables, plan: Plan) -> tuple[Borders, ...]:
    """Per stage. Equal stages with equal layouts share them."""
    last = _last.of(tables).get(None)
    if last is None or last[0] is not plan:
        last = _last.of(tables)[None] = plan, _borders(tables, plan)
    return last[1]


def _borders(tables: CostTables, plan: Plan) -> tuple[Borders, ...]:
    named = {layout.name: layout for layout in plan.layouts}
    key = tuple(
        (
            s.first,
            s.last,
            s.model,
            *(tables.blocks.layout_key(named[n]) for n in s.layouts.values()),
        )
        for s in plan.stages
    )
    known = _known.of(tables)
    if key not in known:
        crossing = crossings(plan, tables.graph)
        indices = range(len(plan.stages))
        known[key] = tuple(_of_stage(tables, plan, i, crossing, named) for i in indices)
    return known[key]


def _of_stage(
    tables: CostTables,
    plan: Plan,
    index: int,
    crossing: Mapping[str, Crossing],
    named: Mapping[str, BlockLayout],
) -> Borders:
    model = plan.stages[index].model
    leaving = {name: c.layout for name, c in crossing.items() if c.leaves(index)}
    trained = {n: layout for n, layout in leaving.items() if tables.graph.tensors[n].requires_grad}
    changes = tuple(_changes(tables, plan, index, crossing, named))
    return Borders(changes, *[_one_way(tables, each, model) for each in (leaving, trained)])


def _one_way(tables: CostTables, leaving: Mapping[str, Where], model: ModelMesh) -> OneWay:
    whole = fixed = alike = 0
    for name, layout in leaving.items():
        of_batch, beside = _part(tables, name, layout, model)
        whole, fixed = whole + of_batch, fixed + beside
        alike += of_batch * (not isinstance(layout.get(_TENSOR, R), Shard))
    return OneWay(whole, fixed, alike)


def _part(tables: CostTables, name: str, layout: Where, model: ModelMesh) -> tuple[int, int]:
    """(bytes of one rank's part for a global batch, bytes that do not depend on the batch)."""
    tensor, axes = tables.graph.tensors[name], {axis: Axis(size) for axis, size in model}
    if tensor.kind is not Kind.ACTIVATION:
        return 0, 0
    split = {axis: placed for axis, placed in layout.items() if axis in axes}
    shape = local_shape(tensor.shape, split, axes, dict.fromkeys(axes, 0))
    nbytes = prod(shape) * DTYPE_BYTES[tables.facts.dtypes[name]]
    return (nbytes, 0) if isinstance(layout.get("dp", R), Shard) else (0, nbytes)


def part_bytes(
    tables: CostTables, layouts: Mapping[str, BlockLayout], *, back: bool = False
) -> tuple[tuple[int, int], ...]:
    """What crosses into each block if a stage begins there: one rank's part for a global batch,
    and what does not depend on the batch. `layouts`: by pattern, those of the stages on both sides,
    whose model meshes are equal. `back`: of the gradients of that."""
    blocks = tables.graph.blocks
    made: dict[str, tuple[int, Where]] = {}
    read: dict[str, list[tuple[int, Where]]] = {}
    wheres = {pattern: _ends(layout) for pattern, layout in layouts.items()}
    for index, block in enumerate(blocks):
        entries, exits = wheres[block.pattern]
        for name, where in zip(block.inputs, entries, strict=True):
            read.setdefault(name, []).append((index, where))
        for name, where in zip(block.outputs, exits, strict=True):
            made[name] = index, where
    found = [(0, 0)] * len(blocks)
    for name, (home, where) in made.items():
        if back and not tables.graph.tensors[name].requires_grad:
            continue
        readers = read.get(name, [])
        for border in range(home + 1, max((r for r, _ in readers), default=home) + 1):
            alike = all(same_on_model(where, w) for r, w in readers if r >= border)
            crossing = where if alike else {"dp": where.get("dp", R)}
            whole, fixed = _part(tables, name, crossing, layouts[blocks[home].pattern].model)
            found[border] = found[border][0] + whole, found[border][1] + fixed
    return tuple(found)


def _changes(
    tables: CostTables,
    plan: Plan,
    index: int,
    crossing: Mapping[str, Crossing],
    named: Mapping[str, BlockLayout],
) -> Iterator[_Change]:
    stage = plan.stages[index]
    known = {name: c.layout for name, c in crossing.items() if c.enters(index)}
    sent = {name: c.layout for name, c in crossing.items() if c.leaves(index)}
    wheres = {pattern: _ends(named[name]) for pattern, name in stage.layouts.items()}
    for block in plan.stage_blocks(tables.graph, index):
        entries, exits = wheres[block.pattern]
        for name, where in zip(block.inputs, entries, strict=True):
            if name in known and known[name] != where:
                yield from _change(name, known[name], where)
        for name, made in zip(block.outputs, exits, strict=True):
            known[name] = sent[name] if name in sent else made
            if name != tables.graph.loss and known[name] != made:
                yield from _change(name, made, known[name])


def _ends(layout: BlockLayout) -> tuple[list[Where], list[Where]]:
    """How a block takes and hands on its values."""
    return [placements(text) for text in layout.inputs], [placements(t) for t in layout.outputs]


def _change(name: str, source: Where, target: Where) -> Iterator[_Change]:
    if any(source.get(a, R) != target.get(a, R) for a in source.keys() | target.keys()):
        yield name, tuple(source.items()), tuple(target.items())


def passage(tables: CostTables, found: Borders, spot: BlockSpot) -> Passage:
    """What the conversions between the blocks of a stage cost."""
    if not found.changes:
        return Passage()
    known, key = _passages.of(tables), (found.changes, spot)
    if key not in known:
        clocks = []
        for name, source, target in found.changes:
            walk = Walk(tables.facts, tables.blocks.site(spot), None)
            walk.placed[name] = dict(source)
            walk.convert(name, dict(target))
            clocks.append(walk.clock)
        known[key] = Passage(
            sum(c.comm_forward_s for c in clocks),
            sum(c.comm_backward_s for c in clocks),
            sum(c.uncertain_s for c in clocks),
        )
    return known[key]


def border(tables: CostTables, plan: Plan, index: int, *, back: bool = False) -> tuple[float, int]:
    """(seconds, bytes on the busiest rank) of one micro-batch from stage `index` to the next;
    `back`: of the gradients of that, which come back."""
    if index + 1 >= len(plan.stages):
        return 0.0, 0
    source, target = plan.stages[index], plan.stages[index + 1]
    found = _one_way_of(tables, plan, index, back)
    if source.devices == target.devices or not found.whole_bytes + found.fixed_bytes:
        return 0.0, 0
    busiest = _busiest(plan, source, target)
    # A source rank feeds several target ranks where the next stage splits tensors further.
    copies = max(1, ceil(target.model_size / source.model_size))
    sent = (found.whole_bytes * busiest + found.fixed_bytes) * copies
    ranks = source.mesh.get(_TENSOR, 1)
    in_parts = tables.run_as.parts_borders and ranks == target.mesh.get(_TENSOR, 1)
    gathered = found.alike_bytes * busiest * copies if in_parts and ranks > 1 else 0.0
    apart = sent - gathered + gathered / ranks
    slowest = max([send_time(apart, link) for link in tables.links(source, target)])
    if gathered:
        slowest += collective_time(
            Primitive.ALL_GATHER, round(gathered), _tensor_levels(tables, target)
        )
    return slowest, round(sent)


def _one_way_of(tables: CostTables, plan: Plan, index: int, back: bool) -> OneWay:
    found = borders(tables, plan)[index]
    return found.back if back else found.ahead


def handed_bytes(tables: CostTables, plan: Plan, index: int, *, back: bool = False) -> int:
    """Returns what stage `index` hands to the next one of one micro-batch where the same ranks have
    both: it goes nowhere; `back`: the gradients of that, which it gets."""
    if not 0 <= index < len(plan.stages) - 1:
        return 0
    source, target = plan.stages[index], plan.stages[index + 1]
    if source.devices != target.devices:
        return 0
    found = _one_way_of(tables, plan, index, back)
    return round(found.whole_bytes * _busiest(plan, source, target) + found.fixed_bytes)


def _busiest(plan: Plan, source: Stage, target: Stage) -> float:
    """Share of the batch that is most of a rank's at either end, of one micro-batch."""
    return max(*source.batch_shares, *target.batch_shares) / plan.global_batch_size


def _tensor_levels(tables: CostTables, stage: Stage) -> Levels:
    levels = tables.model_levels(stage.devices[: stage.model_size], stage.model)
    return levels[[axis for axis, _ in stage.model].index(_TENSOR)]
