"""Which ranks of a plan have a process group together: lines of a mesh, and pairs at a border."""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.border import Side, forward_transfers, gradient_transfers
from meshwright.ir.layout.layout import Placement, Shard
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.sampled import sample_ranks

Line = tuple[int, ...]
"""Global ranks that differ in one axis only, in order of their coordinate."""
Pair = tuple[int, int]
"""Source and target of messages."""


def stage_lines(stage: Stage) -> dict[str, tuple[Line, ...]]:
    """Axis -> its lines, in the order of the first rank of each."""
    sizes, both = _meshes(stage)
    found = {axis: _along(stage, sizes, axis) for axis in sizes}
    return found | {"dp": _along(stage, both, "dp")}


def line_of(stage: Stage, axis: str, rank: int) -> Line:
    """The line of an axis that goes through a rank of the stage."""
    sizes, both = _meshes(stage)
    chosen = both if axis == "dp" else sizes
    stride, size = _stride(chosen, axis), chosen[axis]
    at = stage.devices.index(rank)
    first = at - at // stride % size * stride
    return tuple(stage.devices[first + i * stride] for i in range(size))


def _meshes(stage: Stage) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the axes, row-major, with data parallelism as two axes and as one."""
    data = {axis: stage.mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard")}
    return data | dict(stage.model), {"dp": prod(data.values())} | dict(stage.model)


def _stride(sizes: dict[str, int], axis: str) -> int:
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])


def _along(stage: Stage, sizes: dict[str, int], axis: str) -> tuple[Line, ...]:
    """The lines of an axis of a row-major mesh."""
    stride = _stride(sizes, axis)
    starts = [i for i in range(len(stage.devices)) if i // stride % sizes[axis] == 0]
    return tuple(
        tuple(stage.devices[start + i * stride] for i in range(sizes[axis])) for start in starts
    )


def plan_lines(plan: Plan, more: Iterable[Line] = ()) -> tuple[Line, ...]:
    """All lines of a plan that need a group, each once, in the one order of the whole job. `more`
    are further rank sets; PlanError if a line is not in ascending order."""
    wanted = dict.fromkeys([*_lines(plan), *(tuple(sorted(line)) for line in more)])
    return tuple(line for line in wanted if len(line) > 1)


def _lines(plan: Plan) -> Iterator[Line]:
    for index, stage in enumerate(plan.stages):
        for axis, lines in stage_lines(stage).items():
            for line in lines:
                if line != tuple(sorted(line)):
                    raise PlanError(
                        f"stage {index}: the devices {line} along {axis} are not in ascending "
                        f"order; list them as {tuple(sorted(line))}"
                    )
                yield line


def side(plan: Plan, stage: int, apart: tuple[str, ...] = ()) -> Side:
    """The given stage at its borders, for values whose samples are split on axes of `apart`, too:
    for these the axes belong to dp."""
    found = plan.stages[stage]
    if not apart:
        return Side(found.batch_shares, found.model_size, found.devices)
    sizes = {"dp": found.dp} | dict(found.model)
    order = ["dp", *apart, *(axis for axis in sizes if axis not in ("dp", *apart))]
    parts = prod([sizes[axis] for axis in apart])
    devices = [
        found.devices[sum(at[axis] * _stride(sizes, axis) for axis in sizes)]
        for place in product(*[range(sizes[axis]) for axis in order])
        for at in [dict(zip(order, place, strict=True))]
    ]
    shares = tuple([share // parts for share in found.batch_shares for _ in range(parts)])
    return Side(shares, found.model_size // parts, tuple(devices))


def border_pairs(plan: Plan, placement: Placement | None = None) -> tuple[Pair, ...]:
    """All pairs of ranks that have messages, if values at borders lie so on `dp` (default: split by
    samples, and by those of ranks that have their own) and have gradients; each once, in the one
    order of the whole job."""
    values = Shard(0) if placement is None else placement
    found = set()
    for border in range(len(plan.stages) - 1):
        apart = _apart_at(plan, border)
        sides = side(plan, border, apart), side(plan, border + 1, apart)
        for transfers in (forward_transfers, gradient_transfers):
            found |= {(t.source, t.target) for t in transfers(values, *sides)}
    return in_order(found)


def _apart_at(plan: Plan, border: int) -> tuple[str, ...]:
    """Axes that split samples on both sides: between other meshes values cross whole."""
    stages = plan.stages[border : border + 2]
    axes = [sample_ranks(plan, stage)[0] for stage in stages]
    return axes[0] if axes[0] == axes[1] and stages[0].model == stages[1].model else ()


def in_order(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Pairs of two ranks each in the one order of the whole job: by the lower rank, the higher
    one, upward first. Who meets in an order that all share cannot wait in a circle."""
    found = {(source, target) for source, target in pairs if source != target}
    return tuple(sorted(found, key=lambda pair: (min(pair), max(pair), pair[0] > pair[1])))
