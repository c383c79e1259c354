"""Dims that several axes split inside each other, and ways from one layout to another."""

from itertools import product

import pytest

from meshwright.ir.layout.layout import RP, Axis, Layout, P, Placement, R, Shard, local_shape
from meshwright.ir.layout.nesting import dim_runs, local_split, nesting_problem, nests, splits_of
from meshwright.ir.layout.paths import path
from meshwright.ir.layout.samples import sample_axes

BATCH = 4
CASES: dict[str, tuple[int, dict[str, Axis], Layout]] = {
    "one": (7, {"a": Axis(3)}, {"a": Shard(0)}),
    "two": (12, {"a": Axis(2), "b": Axis(3)}, {"a": Shard(0), "b": Shard(0, 2)}),
    "inner uneven": (10, {"a": Axis(2), "b": Axis(3)}, {"a": Shard(0), "b": Shard(0, 2)}),
    "inner first": (10, {"b": Axis(3), "a": Axis(2)}, {"b": Shard(0, 2), "a": Shard(0)}),
    "finer than needed": (24, {"a": Axis(2), "b": Axis(2)}, {"a": Shard(0), "b": Shard(0, 4)}),
    "sections": (36, {"a": Axis(2), "b": Axis(3)}, {"a": Shard(0, 3), "b": Shard(0, 6)}),
    "groups": (
        48, {"a": Axis(2), "b": Axis(3)}, {"a": Shard(0, 1, 12), "b": Shard(0, 2, 4)},
    ),
    "three": (
        20, {"a": Axis(2), "b": Axis(2), "c": Axis(3)},
        {"a": Shard(0), "b": Shard(0, 2), "c": Shard(0, 4)},
    ),
    "inside samples": (
        20, {"dp": Axis(2, (3, 1), BATCH), "a": Axis(2)}, {"dp": Shard(0), "a": Shard(0, BATCH)},
    ),
    "samples inside": (
        24, {"dp": Axis(2, (3, 1), BATCH), "a": Axis(3)}, {"dp": Shard(0, 3), "a": Shard(0)},
    ),
    "samples of their own": (
        24, {"dp": Axis(2, (4, 2), 6), "a": Axis(2)}, {"dp": Shard(0), "a": Shard(0)},
    ),
    "samples of their own in sections": (
        96, {"dp": Axis(2, (8, 4), 12), "a": Axis(2), "b": Axis(2), "c": Axis(2)},
        {"dp": Shard(0, 2), "a": Shard(0, 2), "b": Shard(0, 24), "c": Shard(0, 2)},
    ),
    "inside of samples' sections": (
        24, {"dp": Axis(3, (1, 2, 1), BATCH), "a": Axis(2)},
        {"dp": Shard(0, 2), "a": Shard(0, 2 * BATCH)},
    ),
}  # fmt: skip


def elements(
    size: int, layout: Layout, axes: dict[str, Axis], coordinates: dict[str, int]
) -> list[int]:
    runs = dim_runs(size, splits_of(layout, axes).get(0, {}), coordinates)
    return [start + i for start, length in runs for i in range(length)]


def places(axes: dict[str, Axis]) -> list[dict[str, int]]:
    ranges = [range(axis.size) for axis in axes.values()]
    return [dict(zip(axes, at, strict=True)) for at in product(*ranges)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_share_a_dim(name: str) -> None:
    size, axes, layout = CASES[name]
    assert nests((size,), layout, axes)
    found = [elements(size, layout, axes, at) for at in places(axes)]
    assert sorted(i for own in found for i in own) == list(range(size))
    for at, own in zip(places(axes), found, strict=True):
        assert local_shape((size,), layout, axes, at) == (len(own),)


@pytest.mark.parametrize("name", CASES)
def test_each_axis_is_seen_locally_as_if_alone(name: str) -> None:
    """Cutting what a rank has without the axis, as seen locally, gives what it has with it."""
    size, axes, layout = CASES[name]
    inside = sample_axes(layout, axes)
    for at, axis in product(places(axes), layout):
        if (axis == "dp" and inside) or axis in inside[:-1]:
            continue  # what is inside of them depends on them
        shard = layout[axis]
        assert isinstance(shard, Shard)
        seen = local_split(size, axis, shard, layout, axes, at)
        others = {other: p for other, p in layout.items() if other != axis}
        before = elements(size, others, axes, at)
        assert len(before) == seen.outer * seen.section
        start = sum(seen.sizes[: at[axis]])
        cut = [
            i
            for n in range(seen.outer)
            for i in before[n * seen.section :][start : start + seen.sizes[at[axis]]]
        ]
        assert cut == elements(size, layout, axes, at)


@pytest.mark.parametrize(
    ("size", "inside"), [(8, Shard(0)), (12, Shard(0, 3)), (12, Shard(0, 1, 3))]
)
def test_what_does_not_nest_is_named_with_what_would(size: int, inside: Shard) -> None:
    axes = {"a": Axis(2), "b": Axis(2)}
    problem = nesting_problem(size, splits_of({"a": Shard(0), "b": inside}, axes)[0])
    nearest = Shard(0, 2, inside.inner)
    assert "S(0) on a" in problem and problem.endswith(f"as {nearest} does")
    assert nests((size,), {"a": Shard(0), "b": nearest}, axes)


def test_only_the_innermost_axis_may_be_uneven() -> None:
    axes = {"a": Axis(3), "b": Axis(2)}
    assert nests((15,), {"a": Shard(0), "b": Shard(0, 3)}, axes)
    uneven: Layout = {"a": Shard(0, 1, 6), "b": Shard(0, 3)}
    assert not nests((30,), uneven, axes)
    problem = nesting_problem(30, splits_of(uneven, axes)[0])
    assert "5 units, which 3 parts do not share evenly" in problem


STATES: tuple[Placement, ...] = (R, RP, P, Shard(0), Shard(1), Shard(0, 2), Shard(1, 2))


def test_every_layout_is_reached_over_legal_ones() -> None:
    shape, axes = (8, 8), {"a": Axis(2), "b": Axis(2)}
    legal: list[Layout] = [
        state for a, b in product(STATES, repeat=2) if nests(shape, state := {"a": a, "b": b}, axes)
    ]
    for now, wanted in product(legal, repeat=2):
        state, steps = dict(now), path(shape, now, wanted, axes)
        for axis, placement in steps:
            assert placement != state[axis]
            state[axis] = placement
            assert nests(shape, state, axes), (now, wanted, steps)
        assert state == wanted
        assert len(steps) <= 3


def test_what_shrinks_comes_first_unless_it_is_in_the_way() -> None:
    shape, axes = (8, 8), {"a": Axis(2), "b": Axis(2)}
    shrink = path(shape, {"a": Shard(0), "b": P}, {"a": R, "b": Shard(1)}, axes)
    assert shrink == (("b", Shard(1)), ("a", R))
    blocked = path(shape, {"a": Shard(0), "b": P}, {"a": R, "b": Shard(0)}, axes)
    assert blocked == (("a", R), ("b", Shard(0)))
    swap = path(shape, {"a": Shard(0), "b": Shard(1)}, {"a": Shard(1), "b": Shard(0)}, axes)
    assert swap == (("a", R), ("b", Shard(0)), ("a", Shard(1)))


def test_samples_of_ranks_stay_inside_of_those_of_replicas() -> None:
    """`dp` changes while no axis splits what it leaves."""
    axes = {"dp": Axis(2, (4, 4), 8), "a": Axis(2)}
    both: Layout = {"dp": Shard(0), "a": Shard(0)}
    for now, wanted in product((both, {"dp": R, "a": R}, {"dp": R, "a": Shard(0)}), repeat=2):
        state = dict(now)
        for axis, placement in path((8, 8), now, wanted, axes):
            assert axis != "dp" or not isinstance(state["a"], Shard)
            state[axis] = placement
        assert state == wanted
    odd = splits_of(both, axes | {"a": Axis(3)})[0]
    assert "do not nest" in nesting_problem(8, odd)
