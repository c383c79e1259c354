"""Every plan of a small instance: the oracle that other searchers are tested against.

All contiguous partitions of the blocks, all ways to share out the devices among pipeline ranks
(uneven ones too), all meshes and layouts, ZeRO levels, blocks that are recomputed, keep part or
move what they hold, micro-batch counts, schedules. What fits with less saved is not tried with
more.
"""

from collections.abc import Iterator

from meshwright.ir.errors import PlanError
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.bounds.frames import frames
from meshwright.planner.pins.constraints import broken
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.offers import Offer

MOST = 100_000
"""Choices that are still enumerated."""


def search(problem: Problem) -> Iterator[Offer]:
    """All choices, small pipelines first."""
    total = count(problem, MOST)
    if total > MOST:
        raise PlanError(
            f"more than {MOST} plans: too many to try all; use searcher='ilp', or pin decisions "
            "such as pp or num_microbatches"
        )
    choices = ChoiceSpace(problem)
    for frame in frames(problem):
        for choice in choices.of(frame):
            plan = build_plan(problem, obey(problem, choice))
            if not excess_bytes(problem, plan) and not broken(
                problem.constraints, plan, problem.graph
            ):
                choices.fits.add(choice)
            yield Offer(plan=plan)
    yield Offer(candidates=0, open_s=float("inf"))


def count(problem: Problem, most: int) -> int:
    """How many choices there are; stops soon after `most`."""
    total, choices = 0, ChoiceSpace(problem)
    for frame in frames(problem):
        total += choices.count(frame, most - total)
        if total > most:
            return total
    return total
