"""Sums up the errors of a table and writes them as text and markdown."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from statistics import median

from benchmarks.published.route import Prediction, predict
from benchmarks.published.rows import Row, Skip, Table
from meshwright.ir.errors import MeshwrightError


@dataclass(frozen=True, slots=True)
class Case:
    """A row and what was expected of it."""

    row: Row
    prediction: Prediction

    @property
    def time_error(self) -> float | None:
        """Relative; above zero: predicted too slow."""
        if not self.row.step_s:
            return None
        return self.prediction.step_s / self.row.step_s - 1

    @property
    def memory_error(self) -> float | None:
        if not self.row.peak_bytes:
            return None
        return self.peak_bytes / self.row.peak_bytes - 1

    @property
    def peak_bytes(self) -> float:
        """As the table counts it."""
        return self.prediction.peaks[self.row.memory_kind]

    @property
    def in_band(self) -> bool | None:
        """Whether the step took what the plan says, give or take its stated error."""
        if not self.row.step_s:
            return None
        return abs(self.row.step_s / self.prediction.step_s - 1) <= self.prediction.band


@dataclass(frozen=True, slots=True)
class Result:
    """A table's cases and the rows that were left out."""

    name: str
    cases: tuple[Case, ...]
    skipped: tuple[Skip, ...]


def evaluate(
    table: Table, done: Callable[[Case | Skip], None] = lambda _: None, traces: Path | None = None
) -> Result:
    """Predict every row that can be predicted, and hand each to `done`. `traces`: a folder that
    keeps graphs."""
    cases, skipped = [], list(table.skipped)
    for row in table.rows:
        try:
            cases.append(Case(row, predict(row, traces)))
            done(cases[-1])
        except MeshwrightError as error:
            skipped.append(Skip(row.index, str(error)))
            done(skipped[-1])
    return Result(table.name, tuple(cases), tuple(sorted(skipped, key=lambda s: s.index)))


@dataclass(frozen=True, slots=True)
class Errors:
    """Of a set of relative errors."""

    count: int
    median_abs: float
    p90: float
    worst: float
    bias: float
    within_8: float
    within_25: float


def errors(values: Iterable[float | None]) -> Errors | None:
    signed = sorted(v for v in values if v is not None)
    if not signed:
        return None
    sizes = sorted(map(abs, signed))
    n = len(sizes)
    return Errors(n, median(sizes), sizes[min(n - 1, int(0.9 * n))], sizes[-1], median(signed),
                  sum(s <= 0.08 for s in sizes) / n, sum(s <= 0.25 for s in sizes) / n)  # fmt: skip


HELD = 0.8
"""Share of rows that a plan's band is to hold."""


def widening(cases: Iterable[Case]) -> float | None:
    """Returns by how much bands would have to be as wide for four fifths of unseen runs like these
    to lie inside: the conformal quantile of errors over bands (Vovk et al. 2005), infinite for
    fewer rows than that needs; None without rows."""
    scores = sorted(
        abs(case.row.step_s / case.prediction.step_s - 1) / case.prediction.band
        for case in cases if case.row.step_s
    )  # fmt: skip
    if not scores:
        return None
    place = ceil(HELD * (len(scores) + 1))
    return scores[place - 1] if place <= len(scores) else inf


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation, ties by mean rank."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    mean = (len(pairs) + 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    below = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return top / below**0.5 if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(place)
    return [sum(places[v]) / len(places[v]) for v in values]


def feasibility(cases: Sequence[Case]) -> Counter[tuple[bool, bool]]:
    """(fits, predicted to fit) -> rows, where the table says."""
    return Counter(
        (case.row.fits, case.prediction.fits) for case in cases if case.row.fits is not None
    )
