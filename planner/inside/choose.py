"""The cheapest choice: made smaller, bounded, and what is open then as an integer program."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inside.choice_ilp import UNIT, Solver, solve_program
from meshwright.planner.inside.choices import BlockProblem, Chosen, cost_of
from meshwright.planner.inside.dual_ascent import Ascent
from meshwright.planner.inside.eliminate import Reduced, reduce, restricted
from meshwright.planner.inside.polish import polish

TIGHT = 1e-6
"""Slack, in the program's unit, that is none but for rounding."""

NEAR = 0.1
"""Of the gap that is good enough: states whose slack is within this are tried before all others."""

ROUNDING = 1e-9
"""Relative error of a bound, which is a sum of many numbers."""


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop."""

    gap: float = 0.0
    """Relative: a choice that can be this far from the best is good enough."""
    rounds: tuple[int, ...] = (6, 6, 12, 36)
    """Of the dual ascent, between attempts at a choice."""
    most_states: int = 4000
    """What an integer program may be left with; with more, the choice stays as far from its bound
    as it is."""
    solver: Solver = field(default_factory=Solver)


def choose(choices: BlockProblem, effort: Effort | None = None) -> Chosen:
    """The cheapest choice, with a bound that proves it as far as it is proven."""
    effort, reduced = effort or Effort(), reduce(choices)
    ascent, best, known = Ascent.of(reduced), None, dict[int, int]()
    for rounds in effort.rounds:
        bound = ascent.climb(rounds)
        states = polish(reduced, ascent.decode(sorted(reduced.costs)))
        found = _chosen(choices, reduced.states(states), _whole(bound, reduced))
        if best is None or found.cost < best.cost:
            best, known = found, states
        best = replace(best, bound=min(best.cost, max(best.bound, found.bound)))
        if not _is_open(best, effort):
            return best
    assert best
    return _finish(choices, reduced, ascent, known, best, effort)


def _finish(
    choices: BlockProblem,
    reduced: Reduced,
    ascent: Ascent,
    known: Mapping[int, int],
    best: Chosen,
    effort: Effort,
) -> Chosen:
    """What the ascent leaves open, as integer programs over the states that may be better."""
    bound, slacks = ascent.bound(), ascent.slacks()
    # What the bound hardly tells apart often holds a choice that is good enough; it is few states.
    for tight in (True, False):
        open_ps = (
            NEAR * effort.gap * best.cost if tight else best.cost - reduced.offset - bound * UNIT
        )
        room = open_ps / UNIT + TIGHT
        alive = {n: slack <= room for n, slack in slacks.items()}
        for n, state in known.items():
            alive[n][state] = True
        if sum(int(a.sum()) for a in alive.values()) > effort.most_states:
            break
        states, proven = _integer(reduced, alive, effort.solver)
        least = best.bound if tight else max(best.bound, min(best.cost, proven))
        best = min(
            replace(best, bound=least), _chosen(choices, states, least), key=lambda c: c.cost
        )
        if not _is_open(best, effort):
            break
    return best


def _chosen(choices: BlockProblem, states: tuple[int, ...], bound: int) -> Chosen:
    cost = cost_of(choices, states)
    return Chosen(states, cost, min(cost, bound))


def _is_open(best: Chosen, effort: Effort) -> bool:
    return best.cost - best.bound > max(effort.gap, ROUNDING) * best.cost


def _integer(
    reduced: Reduced, alive: Mapping[int, NDArray[np.bool_]], solver: Solver
) -> tuple[tuple[int, ...], int]:
    """The best choice of states that are alive, and a bound of these."""
    rest = reduce(restricted(reduced, alive))
    left, bound = solve_program(rest, solver) if rest.costs else ({}, 0.0)
    found = dict(zip(sorted(reduced.costs), rest.states(left), strict=True))
    own = {n: int(np.flatnonzero(alive[n])[state]) for n, state in found.items()}
    return reduced.states(own), _whole(bound, rest) + reduced.offset


def _whole(bound: float, reduced: Reduced) -> int:
    """In whole picoseconds, as costs are, with the offset; up to rounding errors of the sum."""
    found = bound * UNIT
    return int(np.ceil(found - 1e-3 - 1e-9 * abs(found))) + reduced.offset
