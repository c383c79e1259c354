"""Model axes that split the samples of a replica, so that each of their ranks has its own.

An axis does so where it splits a value exactly as `dp` does: `S(0)` on `ep` beside `S(0)` on `dp`.
Then its ranks have equal runs of the samples that `dp` gives the replica. That is how ranks of
experts have samples of their own: for such a value both axes are one, of more ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import Axis, Layout, R, Replicate, Shard


def sample_axes(layout: Layout, axes: Mapping[str, Axis]) -> tuple[str, ...]:
    """Returns the model axes that split samples in a layout, in the order of the mesh."""
    data = layout.get("dp", R)
    if not isinstance(data, Shard) or "dp" not in axes:
        return ()
    return tuple(
        [
            name
            for name, axis in axes.items()
            if name != "dp" and layout.get(name) == data and _shares(axes["dp"], axis)
        ]
    )


def _shares(data: Axis, axis: Axis) -> bool:
    return data.whole > 1 and axis.size > 1 and data.whole % axis.size == 0


@dataclass(frozen=True, slots=True)
class SampleSpot:
    """A layout at a rank, where axes that split samples belong to `dp`."""

    layout: Layout
    axes: Mapping[str, Axis]
    coordinates: Mapping[str, int]
    before: int
    """Samples of the replica that are on its ranks before this one."""


def samples_on_dp(
    layout: Layout, axes: Mapping[str, Axis], coordinates: Mapping[str, int]
) -> SampleSpot:
    """Returns a layout as `dp` alone would split the samples; PlanError if a replica's do not
    divide among the ranks."""
    names = sample_axes(layout, axes)
    if not names:
        return SampleSpot(layout, axes, coordinates, 0)
    data, parts, at = axes["dp"], prod([axes[name].size for name in names]), 0
    for name in names:
        at = at * axes[name].size + coordinates.get(name, 0)
    for share in data.shares:
        if share % parts:
            raise PlanError(share_problem(share, parts, names))
    own = coordinates.get("dp", 0)
    shares = tuple([share // parts for share in data.shares for _ in range(parts)])
    merged = Axis(data.size * parts, shares, data.whole)
    return SampleSpot(
        {name: placed for name, placed in layout.items() if name not in names},
        {"dp": merged} | {n: axis for n, axis in axes.items() if n not in (*names, "dp")},
        {n: c for n, c in coordinates.items() if n not in names} | {"dp": own * parts + at},
        shares[own * parts] * at if shares else 0,
    )


def halved_dim(layout: Layout, own: Collection[str]) -> int | None:
    """Returns the dim along which a value may be cut into two runs of each rank's samples, where
    the axes of `own` split samples, too; None if it has no samples, -1 if it cannot be cut."""
    data = layout.get("dp", R)
    if isinstance(data, Replicate):
        return None
    if not isinstance(data, Shard) or data.outer > 1:
        return -1
    others = {a: p for a, p in layout.items() if a != "dp" and isinstance(p, Shard)}
    apart = {axis for axis, placed in others.items() if placed.dim == data.dim}
    alike = all(others[axis] == data for axis in apart)
    return data.dim if alike and apart == set(own) else -1


def share_problem(share: int, parts: int, names: tuple[str, ...]) -> str:
    """Returns why so many samples of a replica do not divide among the ranks of axes."""
    return (
        f"{share} samples of a replica do not divide among the {parts} ranks of "
        f"{', '.join(names)}, each of which has samples of its own"
    )
