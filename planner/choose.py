"""The cheapest choice: made smaller, bounded, and what is open then as an integer program."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.choice_ilp import UNIT, Solver, solve_program
from meshwright.planner.choices import Choices, Chosen, cost_of
from meshwright.planner.dual_ascent import Ascent
from meshwright.planner.eliminate import Reduced, keep_states, reduce


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop."""

    gap: float = 1e-9
    """Relative: a choice that can be this far from the best is good enough."""
    rounds: int = 60
    """Of the dual ascent."""
    solver: Solver = field(default_factory=Solver)


def choose(choices: Choices, effort: Effort | None = None) -> Chosen:
    """The cheapest choice, with a bound that proves it as far as it is proven."""
    effort, reduced = effort or Effort(), reduce(choices)
    ascent = Ascent.of(reduced)
    bound = ascent.climb(effort.rounds)
    left = ascent.decode(sorted(reduced.costs))
    states = reduced.states(left)
    best = cost_of(choices, states)
    least = min(best, _picoseconds(bound, reduced))
    if best - least <= effort.gap * best:
        return Chosen(states, best, least)
    room = (best - reduced.offset) / UNIT - bound
    alive = {n: slack <= room + 1e-6 for n, slack in ascent.slacks().items()}
    found, proven = _integer(reduced, alive, effort.solver)
    least = max(least, min(best, proven))
    cost = cost_of(choices, found)
    return Chosen(found, cost, min(cost, least)) if cost < best else Chosen(states, best, least)


def _integer(
    reduced: Reduced, alive: dict[int, NDArray[np.bool_]], solver: Solver
) -> tuple[tuple[int, ...], int]:
    """The best choice of what is alive; nothing else can be better than what is known."""
    rest = keep_states(reduced, alive)
    left, bound = solve_program(rest, solver)
    return rest.states(left), _picoseconds(bound, rest)


def _picoseconds(bound: float, reduced: Reduced) -> int:
    return int(np.floor(bound * UNIT)) + reduced.offset
