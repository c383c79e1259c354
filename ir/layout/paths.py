"""From one layout of a value to another: which axis is converted when."""

from collections.abc import Mapping

from meshwright.ir.layout.layout import Axis, Layout, Placement, R, Shard
from meshwright.ir.layout.nesting import nests
from meshwright.ir.layout.samples import sample_axes


def path(
    shape: tuple[int, ...], now: Layout, wanted: Layout, axes: Mapping[str, Axis]
) -> tuple[tuple[str, Placement], ...]:
    """The axes in the order in which they change, and what each becomes.

    What makes the value smaller comes first and what makes it larger last, as long as the splits
    nest at every step. A split that is in everyone's way is made whole first, and one of samples
    before `dp` changes.
    """
    state = {axis: now.get(axis, R) for axis in axes}
    goals = {axis: wanted.get(axis, R) for axis in axes}
    steps: list[tuple[str, Placement]] = []
    while pending := [axis for axis in axes if state[axis] != goals[axis]]:
        pending.sort(key=lambda axis: _growth(state[axis], goals[axis]))
        legal = (
            axis
            for axis in pending
            if nests(shape, state | {axis: goals[axis]}, axes)
            and not _waits(axis, state, goals, axes)
        )
        axis = next(legal, None)
        if axis is None:
            inside = _inside(state, goals, axes) if "dp" in pending else ()
            others = (a for a in pending if isinstance(state[a], Shard))
            axis = next(iter((*inside, *others)))
            steps.append((axis, R))
        else:
            steps.append((axis, goals[axis]))
        state[steps[-1][0]] = steps[-1][1]
    return tuple(steps)


def _waits(axis: str, state: Layout, goals: Layout, axes: Mapping[str, Axis]) -> bool:
    """Whether another axis has to move first: what splits samples is inside of `dp`."""
    if axis == "dp":
        return bool(_inside(state, goals, axes))
    if "dp" not in axes or state["dp"] == goals["dp"]:
        return False
    return axis in {
        *sample_axes(state | {axis: goals[axis]}, axes), *sample_axes(goals, axes)
    }  # fmt: skip


def _inside(state: Layout, goals: Layout, axes: Mapping[str, Axis]) -> tuple[str, ...]:
    """Axes that split what `dp` leaves now, or would once it has moved."""
    then = sample_axes(state | {"dp": goals["dp"]}, axes)
    return tuple(dict.fromkeys([*sample_axes(state, axes), *then]))


def _growth(source: Placement, target: Placement) -> int:
    if isinstance(target, Shard):
        return 0
    return 2 if isinstance(source, Shard) else 1
