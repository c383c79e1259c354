"""Who owns which matrix: against every way to share them out, and against simpler rules."""

from itertools import product
from random import Random

import pytest

from meshwright.forms.placing import ALL, MatrixTask, Owners, placed, weight


def takes(tasks: list[MatrixTask], of: tuple[int, ...], ranks: int) -> float:
    loads, common = [0.0] * ranks, 0.0
    for task, rank in zip(tasks, of, strict=True):
        common += task.work if rank == ALL else task.told
        if rank != ALL:
            loads[rank] += task.work
    return common + max(loads)


def best(tasks: list[MatrixTask], ranks: int, by_all: bool) -> float:
    """Of all ways."""
    known = range(ALL if by_all else 0, ranks)
    return min(takes(tasks, of, ranks) for of in product(known, repeat=len(tasks)))


def drawn(random: Random, count: int, told: bool) -> list[MatrixTask]:
    return [MatrixTask(random.random(), told * random.random() * 0.6) for _ in range(count)]


def in_turn(count: int, ranks: int) -> tuple[int, ...]:
    return tuple(i % ranks for i in range(count))


def longest_first(tasks: list[MatrixTask], ranks: int, by_all: bool) -> tuple[int, ...]:
    """To whom has least (Graham 1969); by all where that takes less than telling (SPD-KFAC)."""
    loads, of = [0.0] * ranks, [ALL] * len(tasks)
    for i in sorted(range(len(tasks)), key=lambda i: -tasks[i].work):
        if not (by_all and tasks[i].work < tasks[i].told):
            of[i] = loads.index(min(loads))
            loads[of[i]] += tasks[i].work
    return tuple(of)


@pytest.mark.parametrize("by_all", [False, True])
def test_few_are_shared_out_as_well_as_can_be(by_all: bool) -> None:
    random = Random(0)
    for count, ranks in ((0, 2), (1, 3), (4, 2), (6, 3), (7, 3), (8, 2)) * 3:
        tasks = drawn(random, count, told=by_all)
        found = placed(tasks, ranks, by_all=by_all)
        assert found.proven
        assert found.takes == pytest.approx(best(tasks, ranks, by_all), rel=1e-12)
        assert found.takes == pytest.approx(takes(tasks, found.of, ranks), rel=1e-12)


def test_ten_on_three_ranks() -> None:
    tasks = drawn(Random(1), 10, told=False)
    assert placed(tasks, 3).takes == pytest.approx(best(tasks, 3, False), rel=1e-12)


@pytest.mark.parametrize(("count", "ranks"), [(20, 3), (54, 64), (160, 16), (300, 64), (1200, 8)])
def test_many_are_never_shared_out_worse_than_by_simpler_rules(count: int, ranks: int) -> None:
    for seed in range(3):
        for by_all in (False, True):
            tasks = [MatrixTask(w**3, t * by_all) for w, t in drawn(Random(seed), count, told=True)]
            found = placed(tasks, ranks, by_all=by_all)
            for of in (in_turn(count, ranks), longest_first(tasks, ranks, by_all)):
                assert found.takes <= takes(tasks, of, ranks) * (1 + 1e-12)
            assert found.takes == pytest.approx(takes(tasks, found.of, ranks), rel=1e-12)


def test_all_ranks_find_the_same() -> None:
    """Also of tasks that are alike, and at the end of the search's patience."""
    tasks = [MatrixTask(float(i % 7 + 1)) for i in range(40)]
    found: Owners = placed(tasks, 6)
    assert all(placed(list(tasks), 6) == found for _ in range(3))
    assert max(found.loads) < 1.02 * sum(found.loads) / 6


def test_weights_are_those_of_the_work() -> None:
    assert weight((8, 4), "products") == 8 * 4 * 4
    assert weight((8, 2, 2), "inverses") == 8**3 + 4**3
    assert weight((8, 4), "values") == 32
    assert weight((8,), "products") == 8 and weight((), "values") == 1
