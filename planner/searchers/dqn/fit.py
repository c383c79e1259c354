"""As little recomputed or moved to the host as still fits, by the simulator."""

from collections.abc import Iterator

from meshwright.planner.problem.candidates import Choice
from meshwright.planner.searchers.dqn.drafts import Sketches
from meshwright.planner.searchers.dqn.judge import Judge, Verdict


def fitted(judge: Judge, sketches: Sketches, choice: Choice) -> list[Verdict]:
    """Of the choice and of what was tried: more of it until it fits, or less while it does."""
    return [judge(each) for each in tried(judge, sketches, choice)]


def tried(judge: Judge, sketches: Sketches, choice: Choice) -> Iterator[Choice]:
    """The choice, then what bisection simulates."""
    fits = judge(choice).fits
    yield choice
    good, bad, step = (0, None, -1) if fits else (None, 0, 1)
    while good is None or bad is None:
        last = sketches.shifted(choice, step // 2 if abs(step) > 1 else 0)
        other = sketches.shifted(choice, step)
        if other == last:
            return
        yield other
        good, bad = (step, bad) if judge(other).fits else (good, step)
        step *= 2
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        other = sketches.shifted(choice, middle)
        yield other
        good, bad = (middle, bad) if judge(other).fits else (good, middle)
