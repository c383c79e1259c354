"""All moves between placements at once, against `ir.layout.paths` one by one."""

from itertools import product

import pytest

from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import RP, Axis, P, Placement, R, Shard
from meshwright.ir.layout.nesting import nests
from meshwright.ir.layout.paths import path
from meshwright.planner.inside.moves import AxisMove, Moves, share

SHAPE = (8, 24, 12)
Place = tuple[Placement, ...]
MESHES = ((2,), (2, 2), (4, 2), (2, 3), (2, 2, 2))


def placements(size: int, count: int) -> list[Placement]:
    """Some that get in each other's way."""
    nested = [Shard(1, outer=2), Shard(0, outer=2)] if count < 3 else [Shard(1, outer=2)]
    return [R, RP, P, Shard(1), Shard(0), *nested, *([Shard(2, inner=2)] if size == 3 else [])]


def steps(sizes: tuple[int, ...], source: Place, target: Place) -> list[AxisMove]:
    names = [f"a{i}" for i in range(len(sizes))]
    axes = {name: Axis(size) for name, size in zip(names, sizes, strict=True)}
    now, found = dict(zip(names, source, strict=True)), []
    for name, placement in path(SHAPE, now, dict(zip(names, target, strict=True)), axes):
        left = 1.0
        for other, size in zip(names, sizes, strict=True):
            left *= share(SHAPE, now[other], size) if other != name else 1.0
        move = Conversion(now[name], placement)
        found.append(AxisMove(names.index(name), move.forward, move.backward, left))
        now[name] = placement
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_steps_are_those_of_the_path(sizes: tuple[int, ...]) -> None:
    moves = Moves(sizes)
    axes = {f"a{i}": Axis(size) for i, size in enumerate(sizes)}
    every = [
        place
        for place in product(*(placements(size, len(sizes)) for size in sizes))
        if nests(SHAPE, dict(zip(axes, place, strict=True)), axes)
    ][:: 1 if len(sizes) < 3 else 5]
    numbers = moves.listed(every)
    table = moves.table(SHAPE, numbers, numbers)
    for (i, source), (j, target) in product(enumerate(every), repeat=2):
        codes = [int(step[i, j]) for step in table.codes]
        found = [table.steps[code - 1] for code in codes if code]
        assert found == steps(sizes, source, target), (source, target)
