"""Whether a block layout can be true of its block: texts parse, arities match, splits fit."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Block, Graph, Kind, Op
from meshwright.ir.layout.conversions import dual
from meshwright.ir.layout.layout import (
    Axis,
    Layout,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    Strategy,
    parse_placement,
    parse_strategy,
    units_of,
    zigzag_problem,
)
from meshwright.ir.layout.nesting import nesting_problem, splits_of
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, param_key


@cache
def axes_of(batch_size: int, model: ModelMesh) -> Mapping[str, Axis]:
    """The layout axes; the parts of dp, however many ranks it has, are samples."""
    data = Axis(1, (batch_size,), batch_size)
    return {"dp": data} | {axis: Axis(size) for axis, size in model}


def layout_problems(graph: Graph, block: Block, layout: BlockLayout) -> list[str]:
    """Every rule that the layout breaks, as a sentence naming the place and the rule."""
    return [
        *_unknown_names(graph, block, layout),
        *_borders(graph, block, layout),
        *_parameters(graph, block, layout),
        *_ops(graph, block, layout),
    ]


def _unknown_names(graph: Graph, block: Block, layout: BlockLayout) -> Iterator[str]:
    ops = {op.key for op in graph.block_ops(block)}
    params = {param_key(block, graph.tensors[name].fqn) for name in block.params}
    for key in sorted(layout.ops.keys() - ops):
        yield f"{layout.name}: {block.pattern} has no op {key!r}"
    for key in sorted(layout.parameters.keys() - params):
        yield f"{layout.name}: {block.pattern} has no parameter {key!r}"


def _borders(graph: Graph, block: Block, layout: BlockLayout) -> Iterator[str]:
    for what, names, placed in (
        ("input", block.inputs, layout.inputs),
        ("output", block.outputs, layout.outputs),
    ):
        if len(names) != len(placed):
            yield f"{layout.name}: {len(placed)} {what}s, the block has {len(names)}"
            continue
        for name, axes in zip(names, placed, strict=True):
            yield from _placed(graph, name, axes, layout, f"{what} {name}")


def _parameters(graph: Graph, block: Block, layout: BlockLayout) -> Iterator[str]:
    for name in block.params:
        key = param_key(block, graph.tensors[name].fqn)
        axes = layout.parameters.get(key, {}) if graph.tensors[name].fqn else {}
        yield from _placed(graph, name, axes, layout, f"parameter {key}")
        if any(text == "P" for text in axes.values()):
            yield f"{layout.name}: parameter {key} is P; it is stored as R, R|P or S"
        if axes.get("dp", "R") not in ("R", "R|P"):
            yield f"{layout.name}: parameter {key} is {axes['dp']} on dp; there it is stored whole"


def _placed(
    graph: Graph, name: str, axes: Mapping[str, str], layout: BlockLayout, what: str
) -> Iterator[str]:
    """Problems of one value's placements."""
    found: Layout = {}
    for axis, text in axes.items():
        if axis not in (known := axes_of(graph.batch_size, layout.model)):
            yield f"{layout.name}: {what}: axis {axis!r} is not one of its {', '.join(known)}"
            continue
        try:
            found[axis] = parse_placement(text)
        except PlanError as error:
            yield f"{layout.name}: {what}: {error}"
            continue
        yield from _fits(graph, name, found[axis], axis, layout, what)
    yield from _nest(graph, name, found, layout, what)


def _nest(graph: Graph, name: str, placed: Layout, layout: BlockLayout, what: str) -> Iterator[str]:
    """Axes that split one dim must split it inside each other."""
    if sum(isinstance(placement, Shard) for placement in placed.values()) < 2:
        return
    shape = graph.tensors[name].shape
    for dim, splits in splits_of(placed, axes_of(graph.batch_size, layout.model)).items():
        fits = dim < len(shape) and not any(
            shape[dim] % (shard.outer * shard.inner) for shard, _ in splits.values()
        )
        if fits and (problem := nesting_problem(shape[dim], splits)):
            yield f"{layout.name}: {what}: dim {dim}: {problem}"


def _fits(
    graph: Graph, name: str, placement: Placement, axis: str, layout: BlockLayout, what: str
) -> Iterator[str]:
    tensor = graph.tensors[name]
    match placement:
        case Shard(dim):
            if dim >= len(tensor.shape):
                yield f"{layout.name}: {what}: {placement} of a value of {len(tensor.shape)} dims"
                return
            try:
                units = units_of(tensor.shape[dim], placement)
            except PlanError as error:
                yield f"{layout.name}: {what}: {error}"
                return
            ranks = dict(layout.model).get(axis, 1)
            if units < ranks:
                yield f"{layout.name}: {what}: {placement} has {units} units for {axis} {ranks}"
            if problem := zigzag_problem(tensor.shape[dim], placement, ranks):
                yield f"{layout.name}: {what}: {axis}: {problem}"
            if placement.zigzag and axis == "dp":
                yield f"{layout.name}: {what}: {placement} on dp, whose parts are samples in order"
            if axis == "dp" and units % graph.batch_size:
                yield (
                    f"{layout.name}: {what}: {placement} has {units} units, which do not hold "
                    f"{graph.batch_size} samples a whole number of times"
                )
        case Partial():
            if tensor.dtype == "bool":
                yield f"{layout.name}: {what}: a bool cannot be a sum"
        case Replicate(True):
            if not tensor.requires_grad:
                yield f"{layout.name}: {what}: R|P of a value without gradient; R is meant"


def _ops(graph: Graph, block: Block, layout: BlockLayout) -> Iterator[str]:
    for op in graph.block_ops(block):
        parsed: dict[str, Strategy] = {}
        for axis, text in layout.ops.get(op.key, {}).items():
            try:
                parsed[axis] = parse_strategy(text)
            except PlanError as error:
                yield f"{layout.name}: {op.key} on {axis}: {error}"
        for axis, strategy in parsed.items():
            yield from _strategy(graph, op, axis, strategy, layout)
        yield from _all_axes(graph, op, parsed, layout)


def _strategy(
    graph: Graph, op: Op, axis: str, strategy: Strategy, layout: BlockLayout
) -> Iterator[str]:
    where = f"{op.key} ({op.target}) on {axis}"
    if axis not in (known := axes_of(graph.batch_size, layout.model)):
        yield f"{layout.name}: {where}: the axes of the layout are {', '.join(known)}"
        return
    arity = (len(strategy.inputs), len(strategy.outputs))
    if arity != (len(op.inputs), len(op.outputs)):
        yield (
            f"{layout.name}: {where}: strategy {strategy} has {arity[0]} inputs and {arity[1]} "
            f"outputs, the op has {len(op.inputs)} and {len(op.outputs)}"
        )
        return
    names = (*op.inputs, *op.outputs)
    for name, placement in zip(names, (*strategy.inputs, *strategy.outputs), strict=True):
        if name:
            yield from _fits(graph, name, placement, axis, layout, f"{where}: {name}")
    yield from _meaning(graph, op, strategy, f"{layout.name}: {where}")


def _meaning(graph: Graph, op: Op, strategy: Strategy, where: str) -> Iterator[str]:
    """What no op allows: summands without gradients to match, splits that come from nothing."""
    made = [p for name, p in zip(op.outputs, strategy.outputs, strict=True) if name]
    if any(isinstance(p, Partial) for p in strategy.inputs) and all(p == R for p in made):
        yield f"{where}: {strategy} turns summands into a whole value; convert P to R first"
    partial = [
        graph.tensors[name].requires_grad and isinstance(dual(p), Partial)
        for name, p in zip(op.outputs, strategy.outputs, strict=True)
        if name
    ]
    kept = [
        p == R and graph.tensors[name].requires_grad
        for name, p in zip(op.inputs, strategy.inputs, strict=True)
    ]
    if any(partial) and any(kept):
        yield f"{where}: {strategy} makes whole gradients of partial ones; R|P is meant, not R"


def _all_axes(
    graph: Graph, op: Op, parsed: Mapping[str, Strategy], layout: BlockLayout
) -> Iterator[str]:
    """The splits of each value of an op must nest."""
    known, names = axes_of(graph.batch_size, layout.model), (*op.inputs, *op.outputs)
    places = {
        axis: (*strategy.inputs, *strategy.outputs)
        for axis, strategy in parsed.items()
        if axis in known and len(strategy.inputs) + len(strategy.outputs) == len(names)
    }
    for i, name in enumerate(names):
        placed = {axis: placements[i] for axis, placements in places.items()}
        if name:
            yield from _nest(graph, name, placed, layout, f"{op.key}: tensor {i}")


def tied_problems(graph: Graph, layouts: Sequence[tuple[Block, BlockLayout]]) -> list[str]:
    """Parameters that several blocks of one stage store differently."""
    stored: dict[tuple[str, str], tuple[str, str]] = {}
    found: list[str] = []
    readers = Counter([name for block, _ in layouts for name in block.params])
    for block, layout in layouts:
        for name in block.params:
            if readers[name] == 1 or graph.tensors[name].kind is not Kind.PARAMETER:
                continue
            axes = layout.parameters.get(param_key(block, graph.tensors[name].fqn), {})
            for axis, _ in layout.model:
                text = axes.get(axis, "R").removesuffix("|P")
                other = stored.setdefault((name, axis), (text, layout.name))
                if other[0] != text:
                    found.append(
                        f"{layout.name}: {graph.tensors[name].fqn} is stored {text} on {axis}, but "
                        f"{other[0]} in {other[1]}; one parameter has one placement in a stage"
                    )
    return found
