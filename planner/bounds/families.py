"""Kinds of schedules, as bounds tell them apart, and what a step takes at least under each."""

from functools import reduce
from typing import NamedTuple

import numpy as np

from meshwright.planner.across.block_ways import Totals
from meshwright.planner.across.spans import Matrix
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import MADE, traits
from meshwright.planner.problem.space import schedules


class Family(NamedTuple):
    """A kind of schedules."""

    halves: bool = False
    """Backwards in two halves."""
    several: bool = False
    """Several stages per rank."""
    early: bool = False
    """Stages recompute ahead of the backward: then that lies on no path."""
    kept: int | None = 0
    """Micro-batches at most that a stage keeps though it makes others again; None: any number."""


Families = frozenset[Family]
PLAIN: Families = frozenset({Family()})


def most_stages(problem: Problem, ranks: int) -> int:
    """On a rank: in the forward of each, the last two copies need not be waited for."""
    return max((stages for _, stages in schedules(problem, ranks)), default=1)


def families_of(problem: Problem, ranks: int) -> Families:
    """Which schedules there are."""
    names = list(schedules(problem, ranks))
    found = set()
    for name, chunks in names:
        known = traits(name)
        found.add(Family(known.halves, chunks > 1, known.early, known.kept))
    if ranks > 1 and allowed(problem.constraints, "schedule", (MADE,)):
        found.add(Family(halves=True))  # a schedule made for the stages may have them
    return frozenset(found)


def step_s(frame: Frame, work: Totals, ahead_s: tuple[float, float], families: Families) -> Matrix:
    """From the work of a micro-batch in the whole model on ranks of one size."""
    ranks, count = frame.num_ranks, frame.num_microbatches
    even = count * work.busy_s / ranks
    bounds = []
    for family in families:
        path = work.input_s if family.halves else work.busy_s
        # Weight halves may wait until the end: then only forwards lie before a rank's work.
        before, share = (work.forward_s, work.share) if family.halves else (work.busy_s, 1.0)
        spent, load, ahead = even, count * work.load_s / ranks, ahead_s[not family.halves]
        if family.early:
            path = before = work.forward_s if family.halves else work.kept_s
            again = _made_again(family, count)
            spent = np.maximum(again * even, count * work.kept_s / ranks)
            load, ahead = again * load, ahead_s[0]
        if family.several:
            found = np.maximum(spent + ahead, path)
        else:
            filled = before / (1 - (1 - share / count) ** ranks)
            found = np.maximum(np.maximum(filled, spent), path)
        bounds.append(np.maximum(found, load))
    least: Matrix = reduce(np.minimum, bounds)
    return least


def _made_again(family: Family, count: int) -> float:
    """Of the micro-batches of a stage that recomputes, how many it does not keep at least."""
    return 0.0 if family.kept is None else max(0.0, 1 - family.kept / count)
