"""What a searcher hands to the driver, and finding searchers by file name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import Plan
from meshwright.planner import searchers
from meshwright.planner.problem.problem import Problem

TIE = 0.005
"""Plans whose predicted steps differ by less are a tie: steps of one plan vary by as much from run
to run. Then the simplest is best, and its notes say so."""
MEASURED_TIE = 0.01
"""The same where costs were measured: two runs of one plan differed by 1 to 10 % on the machine of
docs/results/fastest.md, so that less cannot be told apart."""


def tie(problem: Problem) -> float:
    """By how much the predicted steps of plans that tie may differ, relative to the shortest."""
    return TIE if problem.tables.profile is None else MEASURED_TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan with its prediction, or only news of how far the search is."""

    plan: Plan | None = None
    candidates: int = 1
    """Choices judged since the last offer, this plan included."""
    infeasible: int = 0
    """Those of them that do not fit, this plan not included."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Choices that need not be judged since the last offer, by the reason."""
    bound_s: float | None = None
    """No choice at all takes less, if the searcher knows."""
    open_s: float | None = None
    """No choice that is neither judged nor pruned takes less; infinite when there is none left, and
    None where that is not known."""


Searcher = Callable[[Problem], Iterator[Offer]]
"""Offers plans in any order, also ones that need too much memory: the driver keeps the best, and
owns budget, verification and log. The same problem must give the same offers."""

_FILES = Files(searchers, "searcher")
SEARCHERS = _FILES.names
"""Keys of the searchers: the file names."""


def find_searcher(name: str) -> Searcher:
    """The function `search` of `planner/searchers/<name>.py`."""
    _FILES.check(name, "auto")
    found: Searcher = _FILES.load(name).search
    return found


def is_baseline(name: str) -> bool:
    """Whether a searcher stands for somebody else's: its plans stay as it makes them."""
    return hasattr(_FILES.load(name), "BASELINE")


def check_logs(problem: Problem, name: str) -> None:
    """PlanError where a log of the training is asked for and the searcher trains nothing."""
    if problem.log_dir and not hasattr(_FILES.load(name), "LOGS"):
        raise PlanError(
            f"searcher {name!r} trains nothing that could be logged to {problem.log_dir}; "
            "searcher='dqn' does"
        )
