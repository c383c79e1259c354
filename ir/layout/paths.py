"""From one layout of a value to another: which axis is converted when."""

from collections.abc import Mapping

from meshwright.ir.layout.layout import Axis, Layout, Placement, R, Shard
from meshwright.ir.layout.nesting import nests


def path(
    shape: tuple[int, ...], now: Layout, wanted: Layout, axes: Mapping[str, Axis]
) -> tuple[tuple[str, Placement], ...]:
    """The axes in the order in which they change, and what each becomes.

    What makes the value smaller comes first and what makes it larger last, as long as the splits
    nest at every step. A split that is in everyone's way is made whole first.
    """
    state = {axis: now.get(axis, R) for axis in axes}
    goals = {axis: wanted.get(axis, R) for axis in axes}
    steps: list[tuple[str, Placement]] = []
    while pending := [axis for axis in axes if state[axis] != goals[axis]]:
        pending.sort(key=lambda axis: _growth(state[axis], goals[axis]))
        legal = (axis for axis in pending if nests(shape, state | {axis: goals[axis]}, axes))
        axis = next(legal, None)
        if axis is None:
            axis = next(axis for axis in pending if isinstance(state[axis], Shard))
            steps.append((axis, R))
        else:
            steps.append((axis, goals[axis]))
        state[steps[-1][0]] = steps[-1][1]
    return tuple(steps)


def _growth(source: Placement, target: Placement) -> int:
    if isinstance(target, Shard):
        return 0
    return 2 if isinstance(source, Shard) else 1
