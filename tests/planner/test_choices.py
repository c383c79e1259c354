"""The choice of states: reduced, bounded and solved, against all choices one by one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.inside.choice_ilp import Solver, solve_program
from meshwright.planner.inside.choices import BlockProblem, Reader, ValueEdge, cost_of
from meshwright.planner.inside.choose import UNIT, Effort, choose
from meshwright.planner.inside.dual_ascent import Ascent
from meshwright.planner.inside.eliminate import reduce


@st.composite
def small_choices(draw: st.DrawFn) -> BlockProblem:
    """Up to six nodes of up to four states, links with up to three readers; one may read twice."""
    count = draw(st.integers(2, 6))
    sizes = [draw(st.integers(1, 4)) for _ in range(count)]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    costs = tuple(random.integers(0, 40, size) for size in sizes)
    links = []
    for source in range(count):
        for _ in range(draw(st.integers(0, 2))):
            rows, columns = random.integers(1, 4, 2)
            readers = tuple(
                Reader(node, random.integers(0, columns, sizes[node]))
                for node in random.integers(0, count, draw(st.integers(1, 3))).tolist()
                if node != source
            )
            made = random.integers(0, rows, sizes[source])
            price = random.integers(0, 30, (rows, columns))
            links += [ValueEdge(source, made, readers, price)] * bool(readers)
    return BlockProblem(costs, tuple(links))


def cheapest(choices: BlockProblem) -> int:
    every = product(*(range(len(costs)) for costs in choices.costs))
    return min(cost_of(choices, states) for states in every)


@settings(max_examples=150, deadline=None)
@given(small_choices())
def test_the_choice_equals_brute_force(choices: BlockProblem) -> None:
    found, best = choose(choices), cheapest(choices)
    assert found.cost == best == cost_of(choices, found.states)
    assert best - 1 <= found.bound <= best
    for gap in (0.02, 0.2):
        near = choose(choices, Effort(gap=gap, rounds=(1,)))
        assert near.bound <= best <= near.cost == cost_of(choices, near.states)
        assert near.cost - near.bound <= max(1, gap * near.cost)


@settings(max_examples=100, deadline=None)
@given(small_choices())
def test_bounds_hold_for_the_ascent_and_the_program(choices: BlockProblem) -> None:
    reduced, best = reduce(choices), cheapest(choices)
    ascent = Ascent.of(reduced)
    for _ in range(5):
        assert ascent.climb(1) * UNIT + reduced.offset <= best + 1e-3
    if reduced.costs and (reduced.links or any(reduced.edges.values())):
        left, bound = solve_program(reduced, Solver())
        assert cost_of(choices, reduced.states(left)) == best
        assert bound * UNIT + reduced.offset <= best + 1


@settings(max_examples=40, deadline=None)
@given(small_choices())
def test_slacks_drop_no_state_of_a_better_choice(choices: BlockProblem) -> None:
    """With each state forced in turn, the cheapest choice is at least the bound and its slack."""
    reduced = reduce(choices)
    ascent = Ascent.of(reduced)
    bound = ascent.climb(10)
    for node, slack in ascent.slacks().items():
        for at, more in enumerate(slack):
            forced = [costs + 10**6 for costs in choices.costs]
            state = int(reduced.kept[node][at])
            forced[node][state] -= 10**6
            others = sum(10**6 for n in range(len(forced)) if n != node)
            limit = replace(choices, costs=tuple(forced))
            least = cheapest(limit) - others
            assert least >= (bound + more) * UNIT + reduced.offset - 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_equal_choices_give_equal_states(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = tuple(random.integers(0, 5, 4) for _ in range(8))
    links = tuple(
        ValueEdge(
            n, np.arange(4), tuple(Reader(m, np.arange(4)) for m in (n + 1, (n + 3) % 8) if m < 8),
            random.integers(0, 5, (4, 4)),
        )
        for n in range(8)
    )  # fmt: skip
    assert choose(BlockProblem(costs, links)) == choose(BlockProblem(costs, links))
