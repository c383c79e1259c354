"""Which plans compete: the one that search finds, its best rivals by prediction, and fixed ones."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.plans import Sketch, plan_of
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import executed
from meshwright.planner.search.offers import find_searcher
from meshwright.planner.search.plan_comparison import kind_of, name_of
from meshwright.planner.search.search import search_finalists

FIXED = {
    4: (
        Sketch(dp=4), Sketch(dp=2, tp=2), Sketch(tp=4),
        Sketch(pp=2, dp=2, num_microbatches=4), Sketch(pp=4, num_microbatches=8),
    ),
    8: (
        Sketch(dp=8), Sketch(dp=4, tp=2), Sketch(pp=4, dp=2, num_microbatches=4),
        Sketch(pp=8, num_microbatches=16),
    ),
}  # fmt: skip
"""By processes: a plan of every kind, cut evenly."""
FINALISTS = 4
"""Plans that the search asks to be raced, its best one among them."""
BEST, OF_KIND = 1, 2
"""How many rivals come from the search: the next best, and the best of other kinds."""
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Entrant:
    """A plan and where it comes from: search (its best), finalist, rival or fixed."""

    origin: str
    plan: Plan

    @property
    def name(self) -> str:
        return name_of(self.plan)

    @property
    def predicted_s(self) -> float:
        assert self.plan.predicted
        return self.plan.predicted.step_s


def entrants(problem: Problem) -> list[Entrant]:
    """The best plan of the search first; each name once, and each plan that is run."""
    best, *others = search_finalists(problem, most=FINALISTS, time_limit_s=TIME_LIMIT_S)
    found = [Entrant("search", best), *(Entrant("finalist", plan) for plan in others)]
    return list(_distinct((*found, *_rivals(problem, found), *_fixed(problem))))


def _distinct(entrants: Iterable[Entrant]) -> Iterator[Entrant]:
    seen: set[object] = set()
    for entrant in entrants:
        if seen.isdisjoint((entrant.name, executed(entrant.plan))):
            yield entrant
        seen |= {entrant.name, executed(entrant.plan)}


def _rivals(problem: Problem, found: Sequence[Entrant]) -> Iterator[Entrant]:
    """What else the search looks at: the best by prediction, then the best of each kind."""
    ranked = sorted(_offered(problem), key=lambda entrant: entrant.predicted_s)
    distinct = list(_distinct((*found, *ranked)))[len(found) :]
    best = distinct[:BEST]
    kinds = {kind_of(entrant.plan): entrant for entrant in reversed(distinct)}
    others = sorted(kinds.values(), key=lambda entrant: entrant.predicted_s)
    yield from best
    yield from [e for e in others if e not in best][:OF_KIND]


def _offered(problem: Problem) -> Iterator[Entrant]:
    for offer in find_searcher("ilp")(problem):
        if offer.plan and offer.plan.predicted and not excess_bytes(problem, offer.plan):
            yield Entrant("rival", rehash(offer.plan))


def _fixed(problem: Problem) -> Iterator[Entrant]:
    for sketch in FIXED[problem.cluster.num_devices]:
        try:
            yield Entrant("fixed", plan_of(problem, sketch))
        except PlanError as error:
            print(f"cannot run as {sketch.name}: {error}")


def write(folder: Path, found: Iterable[Entrant]) -> None:
    """One file per plan, with its prediction, and a list of where they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    origins = []
    for number, entrant in enumerate(found):
        plan_io.save(entrant.plan, folder / f"{number:02}.json")
        origins.append(entrant.origin)
    (folder / "origins.json").write_text(json.dumps(origins))


def read(folder: Path) -> list[Entrant]:
    origins = json.loads((folder / "origins.json").read_text())
    return [
        Entrant(origin, plan_io.load(folder / f"{number:02}.json"))
        for number, origin in enumerate(origins)
    ]
