"""The plan that search found beside all that were run, as a page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import torch

from benchmarks.accuracy.measure import ALONE, STEADY
from benchmarks.accuracy.report import quantile, spearman
from benchmarks.fastest.plans import FINALISTS, Entrant
from benchmarks.fastest.race import RACED
from benchmarks.fastest.run import BAR, MOST, SURE, TURNS, Ran, measured_s, noise
from meshwright.planner.search.found import NEAR
from meshwright.runtime.job.machine import machine


@dataclass(frozen=True, slots=True)
class Contest:
    """One model on so many processes; the first entrant was kept after the race."""

    model: str
    size: int
    entrants: tuple[Entrant, ...]
    runs: tuple[Ran, ...]

    @property
    def numbers(self) -> list[int]:
        """Of the plans that have been run, fastest first."""
        known = {ran.number for ran in self.runs}
        return sorted(known, key=lambda number: measured_s(self.runs, number))

    @property
    def searched(self) -> int:
        """The plan that the search thought best, before any was run."""
        return next(n for n, entrant in enumerate(self.entrants) if entrant.origin == "search")

    @property
    def raced(self) -> int:
        return sum(entrant.origin in RACED for entrant in self.entrants)

    @property
    def ratio(self) -> float:
        """The kept plan's step relative to the fastest's."""
        return self.ratio_of(0)

    def ratio_of(self, number: int) -> float:
        return measured_s(self.runs, number) / measured_s(self.runs, self.numbers[0])

    @property
    def errors(self) -> list[float]:
        """Of all predictions, relative to what was measured; absolute."""
        return [
            abs(self.entrants[n].predicted_s / measured_s(self.runs, n) - 1) for n in self.numbers
        ]

    @property
    def rank_correlation(self) -> float | None:
        measured = [measured_s(self.runs, number) for number in self.numbers]
        return spearman([self.entrants[number].predicted_s for number in self.numbers], measured)

    @property
    def over(self) -> bool:
        return any(ran.turn for ran in self.runs)


def report(contests: Sequence[Contest], command: str) -> str:
    """A line per contest, then every plan."""
    over = [contest for contest in contests if contest.over]
    held = sum(contest.ratio <= BAR for contest in over)
    alone = sum(contest.ratio_of(contest.searched) <= BAR for contest in over)
    here = machine(torch.device("cpu"))
    lines = [
        "# The plan that search finds against others that were run", "",
        f"{datetime.now(UTC):%d %B %Y}; {here}, Gloo, float32, batch 16. `{command}`", "",
        f"Within {BAR - 1:.0%} of the fastest: {held} of {len(over)} with a race of the plans that "
        f"search cannot tell apart, {alone} of {len(over)} by search alone. All plans and their "
        "predictions were written before the first of them ran. The race (`meshwright race`) ran "
        f"the best plan and up to {FINALISTS - 1} predicted within {NEAR:.0%} of it and kept the "
        "fastest; its runs count nowhere below. Times are medians of the slowest "
        "rank's steps; plans within 10 % of the best were run "
        f"{TURNS} to {MOST} times more, in turns, each until it was {SURE:g} standard errors from "
        "the bar whether the kept plan is within it; noise is by how much runs of a plan differ. "
        "Fixed work was timed before and after each step, and what it took longer than at the "
        "contest's start (others on the host) is taken off. A run during which other programs used "
        f"more than {ALONE:.0%} of the cores, or that work took {STEADY:.0%} longer, was made "
        f"again. {_errors(over)}",
        "",
        *_table(("model", "processes", "plans run", "raced", "kept", "predicted s", "step s",
                 "fastest", "predicted s", "step s", "ratio", "search alone", "noise", "Spearman"),
                map(_row, over)),
    ]  # fmt: skip
    for contest in over:
        lines += ["", f"## {contest.model} on {contest.size}", ""]
        lines += _table(("plan", "from", "predicted s", "measured s", "error"), _plans(contest))
    return "\n".join(lines) + "\n"


def _errors(contests: Sequence[Contest]) -> str:
    errors = [error for contest in contests for error in contest.errors]
    if not errors:
        return ""
    return (
        f"Steps of all {len(errors)} plans: median error {median(errors):.1%}, 90th percentile "
        f"{quantile(errors, 0.9):.1%}; Spearman is over the plans of a contest."
    )


def _row(contest: Contest) -> tuple[str, ...]:
    first = contest.numbers[0]
    return (
        contest.model, str(contest.size), str(len(contest.numbers)), str(contest.raced),
        *_cells(contest, 0), *_cells(contest, first), f"{contest.ratio:.3f}",
        f"{contest.ratio_of(contest.searched):.3f}", f"{noise(contest.runs):.1%}",
        "-" if contest.rank_correlation is None else f"{contest.rank_correlation:.2f}",
    )  # fmt: skip


def _cells(contest: Contest, number: int) -> tuple[str, str, str]:
    entrant = contest.entrants[number]
    seconds = measured_s(contest.runs, number)
    return entrant.name, f"{entrant.predicted_s:.3f}", f"{seconds:.3f}"


def _plans(contest: Contest) -> list[tuple[str, ...]]:
    rows = []
    for number in contest.numbers:
        entrant, seconds = contest.entrants[number], measured_s(contest.runs, number)
        origin = f"{entrant.origin}, **kept**" if number == 0 else entrant.origin
        error = f"{entrant.predicted_s / seconds - 1:+.1%}"
        rows.append((entrant.name, origin, *_cells(contest, number)[1:], error))
    return rows


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:

    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
