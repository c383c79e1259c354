"""One tensor dim split by several axes: inside each other, so that they are independent.

Axis b may split a dim that axis a splits if each section of b lies inside one part of a: b's
`outer` is a multiple of a's `outer` times a's parts, and a's parts are equal. Converting one of
them then never moves what the other decides. The parts of the data axis are samples; an axis that
splits these as it does is inside of it (`ir.layout.samples`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.ir.layout.layout import Axis, Layout, Shard, local_size, units_of
from meshwright.ir.layout.samples import sample_axes, samples_on_dp

Splits = Mapping[str, tuple[Shard, Axis]]
"""The axes that split one dim."""
Runs = tuple[tuple[int, int], ...]
"""Start and length of the elements of a dim that a rank has, ascending."""


def splits_of(layout: Layout, axes: Mapping[str, Axis]) -> dict[int, dict[str, tuple[Shard, Axis]]]:
    """Tensor dim -> the axes that split it. One that `axes` lacks has one rank."""
    found: dict[int, dict[str, tuple[Shard, Axis]]] = {}
    for name, placement in layout.items():
        if isinstance(placement, Shard) and name in axes:
            found.setdefault(placement.dim, {})[name] = placement, axes[name]
    return found


def outermost_first(splits: Splits) -> list[tuple[str, Shard, Axis]]:
    """The axes of a dim, each inside the one before it if they nest."""
    order = sorted(splits.items(), key=lambda s: (s[1][0].outer, s[1][0].outer * s[1][1].parts))
    return [(name, shard, axis) for name, (shard, axis) in order]


def nesting_problem(size: int, splits: Splits) -> str:
    """Why these axes cannot split a dim of `size` together, with the nearest split that can."""
    together = _sharing(splits)
    others = {name: split for name, split in splits.items() if name not in together}
    for (a, outside, axis), (b, inside, _) in pairwise(outermost_first(others)):
        parts = outside.outer * axis.parts
        if inside.outer % parts:
            nearest = Shard(inside.dim, parts * max(1, inside.outer // parts), inside.inner)
            return (
                f"{outside} on {a} and {inside} on {b} do not nest: {b} must split inside the "
                f"{parts} parts of {a}, as {nearest} does"
            )
        if units_of(size, outside) % axis.parts:
            return (
                f"{outside} on {a} has {units_of(size, outside)} units, which {axis.parts} parts "
                f"do not share evenly, but {b} splits inside of it as {inside}"
            )
        if inside.zigzag and inside.outer // parts % 2:
            return (
                f"{inside} on {b} has {inside.outer // parts} sections in each of the {parts} "
                f"parts of {a}, a zigzag an even number, as {replace(inside, outer=2 * parts)}"
            )
    return ""


def _sharing(splits: Splits) -> tuple[str, ...]:
    """Axes that split samples."""
    layout: Layout = {name: shard for name, (shard, _) in splits.items()}
    return sample_axes(layout, {name: axis for name, (_, axis) in splits.items()})


def nests(shape: tuple[int, ...], layout: Layout, axes: Mapping[str, Axis]) -> bool:
    """Whether every dim that several axes split is split by one inside the other."""
    splits = splits_of(layout, axes)
    return not any(nesting_problem(shape[dim], found) for dim, found in splits.items())


def _is_outside(a: Shard, axis: Axis, b: Shard) -> bool:
    return b.outer % (a.outer * axis.parts) == 0


@dataclass(frozen=True, slots=True)
class LocalSplit:
    """How an axis splits a dim for a rank on which other axes split it already."""

    outer: int
    sizes: tuple[int, ...]
    """Elements of each rank of the axis in each of the `outer` sections."""
    section: int
    """Elements of a section before the split."""
    zigzag: bool = False
    """Every second section is shared out in reverse."""


def local_split(
    size: int,
    axis: str,
    shard: Shard,
    layout: Layout,
    axes: Mapping[str, Axis],
    coordinates: Mapping[str, int],
) -> LocalSplit:
    """`axis` splits a dim of global `size` as `shard` says; the other axes are as in `layout`."""
    outer, section = shard.outer, size // shard.outer
    inside = sample_axes(layout, axes) if axis == "dp" else ()
    sizes = [shard.inner * units for units in axes[axis].sizes(units_of(size, shard))]
    for name, other in layout.items():
        if name == axis or not isinstance(other, Shard) or other.dim != shard.dim or not size:
            continue
        if name in inside:
            continue  # it splits what dp has split
        local = local_size(size, other, axes[name], coordinates[name])
        if _is_outside(other, axes[name], shard):
            outer = outer * local // size
        else:
            section = section * local // size
            sizes = [elements * local // size for elements in sizes]
    return LocalSplit(outer, tuple(sizes), section, shard.zigzag)


def dim_runs(size: int, splits: Splits, coordinates: Mapping[str, int]) -> Runs:
    """What the rank at `coordinates` has of a dim, in the order in which it lies there."""
    layout: Layout = {name: shard for name, (shard, _) in splits.items()}
    at = samples_on_dp(layout, {name: axis for name, (_, axis) in splits.items()}, coordinates)
    own = {name: (splits[name][0], at.axes[name]) for name in at.layout}
    found: Runs = ((0, size),)
    for name, shard, axis in outermost_first(own):
        found = tuple(_common(found, _own(size, shard, axis, at.coordinates[name])))
    return found


def tensor_runs(
    shape: tuple[int, ...],
    layout: Layout,
    axes: Mapping[str, Axis],
    coordinates: Mapping[str, int],
) -> tuple[Runs, ...]:
    """What the rank at `coordinates` has of each dim."""
    splits = splits_of(layout, axes)
    return tuple(dim_runs(size, splits.get(dim, {}), coordinates) for dim, size in enumerate(shape))


def whole_runs(shape: tuple[int, ...]) -> tuple[Runs, ...]:
    """All of each dim."""
    return tuple(((0, size),) for size in shape)


def _own(size: int, shard: Shard, axis: Axis, coordinate: int) -> Iterator[tuple[int, int]]:
    units = units_of(size, shard)
    ways = (coordinate, axis.size - 1 - coordinate if shard.zigzag else coordinate)
    for section in range(shard.outer):
        start, stop = axis.span(units, ways[section % 2])
        yield (section * units + start) * shard.inner, (stop - start) * shard.inner


def _common(runs: Runs, others: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What both have; touching runs become one."""
    cut: list[tuple[int, int]] = []
    for start, length in others:
        for begin, extent in runs:
            first, last = max(start, begin), min(start + length, begin + extent)
            if first >= last:
                continue
            if cut and sum(cut[-1]) == first:
                first = cut.pop()[0]
            cut.append((first, last - first))
    yield from cut
