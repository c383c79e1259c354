"""The place of each element of a value in the whole batch, as a rank that has a part of it counts.

Elements are numbered sample by sample, and in a sample as it would lie alone in memory. A rank's
part of that is a strided tensor: so it can say which number each of its elements has, and two
layouts never disagree. What random numbers an element gets depends on its number
(`ir.random.dropout`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import Axis, Layout, Shard
from meshwright.ir.layout.nesting import Runs, dim_runs, local_split, splits_of
from meshwright.ir.layout.samples import samples_on_dp

_Dim = tuple[int, int]
"""Size and stride; a size of -1 is that of the samples."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """Numbers of a rank's part, which is split into more dims than it has."""

    first: int
    """The number of its first element, for a rank whose first sample is sample 0."""
    sizes: tuple[int, ...]
    """One is -1, the rest of the elements."""
    strides: tuple[int, ...]
    per_sample: int
    """Numbers of a sample; 0 if no dim belongs to samples."""


def numbering(
    shape: tuple[int, ...], layout: Layout, axes: Mapping[str, Axis], coordinates: Mapping[str, int]
) -> Numbering:
    """Of a value of global `shape` for the rank at `coordinates`; samples are what `dp` splits,
    and axes with it (`ir.layout.samples`).

    PlanError if its part of a dim is no strided one.
    """
    at = samples_on_dp(layout, axes, coordinates)
    layout, axes, coordinates = at.layout, at.axes, at.coordinates
    batch = layout.get("dp")
    batch = batch if isinstance(batch, Shard) and "dp" in axes else None
    extents = [*shape]
    if batch:
        extents[batch.dim] = shape[batch.dim] // _samples(shape, batch, axes["dp"])
    total, splits = prod(extents), splits_of(layout, axes)
    first, dims = at.before * total, list[_Dim]()
    for dim, extent in enumerate(extents):
        stride = prod(extents[dim + 1 :])
        others = {name: split for name, split in splits.get(dim, {}).items() if name != "dp"}
        runs = dim_runs(shape[dim], others, coordinates)
        if batch is None or dim != batch.dim:
            found = _strided(_starts(runs), runs[0][1] if runs else 0)
            first += stride * (runs[0][0] if runs else 0)
            dims += [(size, step * stride) for size, step in found]
            continue
        outer = local_split(shape[dim], "dp", batch, layout, axes, coordinates).outer
        places = _within(runs, shape[dim] // batch.outer, extent // batch.outer)
        inner = len(places) // outer
        first += stride * (places[0] if places else 0)
        dims += [(size, step * stride) for size, step in _strided(places[:: max(inner, 1)], 1)]
        dims += [(-1, total)]
        dims += [(size, step * stride) for size, step in _strided(places[:inner], 1)]
    sizes, strides = zip(*_joined(dims), strict=True)
    return Numbering(first, sizes, strides, total if batch else 0)


def _samples(shape: tuple[int, ...], batch: Shard, axis: Axis) -> int:
    """Of the whole batch; where the axis does not say, each element of a section is one."""
    return axis.whole or shape[batch.dim] // batch.outer


def _starts(runs: Runs) -> list[int]:
    lengths = {length for _, length in runs}
    if len(lengths) > 1:
        raise PlanError(
            f"a rank's parts of a dim have {sorted(lengths)} elements, not equally many"
        )
    return [start for start, _ in runs]


def _within(runs: Runs, section: int, each: int) -> list[int]:
    """Places in sample 0, which has the first `each` elements of each section of a dim."""
    found = []
    for start, length in runs:
        for head in range(start - start % section, start + length, section):
            inside = range(max(start, head), min(start + length, head + each))
            found += [head // section * each + place - head for place in inside]
    return found


def _strided(starts: Sequence[int], length: int) -> list[_Dim]:
    """Dims of runs of so many elements that begin there."""
    run = [(length, 1)] if length != 1 else []
    if len(starts) < 2:
        return run if starts else [(0, 1)]
    step = starts[1] - starts[0]
    for count in (n for n in range(len(starts), 1, -1) if len(starts) % n == 0):
        heads = starts[::count]
        if all(
            start == heads[at // count] + step * (at % count) for at, start in enumerate(starts)
        ):
            return [*_strided(heads, 1), (count, step), *run]
    raise PlanError(f"a rank's parts of a dim begin at {list(starts)[:8]}, not at equal distances")


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """The same elements in as few dims as can be, one of which has the size -1."""
    found: list[_Dim] = []
    for size, stride in _last_first(dims):
        if found and found[-1][0] >= 0 and stride == found[-1][0] * found[-1][1]:
            inner = found.pop()
            size, stride = (-1 if size < 0 else size * inner[0]), inner[1]
        found.append((size, stride))
    found.reverse()
    found = found or [(1, 1)]
    if all(size >= 0 for size, _ in found):
        found[0] = (-1, found[0][1])
    return found


def _last_first(dims: Sequence[_Dim]) -> Iterator[_Dim]:
    yield from (dim for dim in reversed(dims) if dim[0] != 1)
