"""Sets predictions beside measurements: errors, rank correlation, where the error comes from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from statistics import mean, median

from benchmarks.accuracy.data import KINDS, Measured, Predicted
from benchmarks.accuracy.measure import STEADY

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """A plan with all its runs."""

    predicted: Predicted
    runs: tuple[Measured, ...]

    @property
    def step_s(self) -> float:
        return median(run.step_s for run in self.runs)

    @property
    def step_error(self) -> float:
        """Relative: 0.1 if the prediction is 10 % too long."""
        return self.predicted.step_s / self.step_s - 1

    @property
    def clock_error(self) -> float:
        """Against the seconds that the clock showed, at whatever pace the machine was."""
        return self.predicted.step_s / median(run.step_s * run.pace for run in self.runs) - 1

    @property
    def resident_bytes(self) -> float:
        """Of the worst rank."""
        return median(max(run.resident_bytes) for run in self.runs)

    @property
    def resident_error(self) -> float:
        return self.predicted.resident_bytes / self.resident_bytes - 1

    @property
    def tensor_bytes(self) -> float:
        """Of the worst rank."""
        return median(max(run.tensor_bytes) for run in self.runs)

    @property
    def tensor_error(self) -> float:
        return self.predicted.tensor_bytes / self.tensor_bytes - 1

    @property
    def noise(self) -> float | None:
        """Distance of the runs' step times, relative to their median; None for a single run."""
        times = [run.step_s for run in self.runs]
        return (max(times) - min(times)) / self.step_s if len(times) > 1 else None

    @property
    def pace(self) -> float:
        return median(run.pace for run in self.runs)

    def excess(self, kind: str) -> float:
        """Predicted minus measured seconds of a kind, relative to the measured step."""
        return (self.predicted.seconds[kind] - mean(r.seconds[kind] for r in self.runs)) / (
            self.step_s
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values in order."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ranks(values: Sequence[float]) -> list[float]:
    """Place of each value in ascending order; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    for _, equal in groupby(order, key=values.__getitem__):
        members = list(equal)
        for index in members:
            found[index] = start + (len(members) - 1) / 2
        start += len(members)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of ranks; None where there is nothing to order."""
    a, b = ranks(first), ranks(second)
    middle = (len(a) - 1) / 2
    spread = sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    if not spread:
        return None
    return sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread


def rows_of(expected: Iterable[Predicted], runs: Iterable[Measured]) -> list[Row]:
    """Plans that were run as predicted, by model and name."""
    by_key: dict[tuple[str, str], list[Measured]] = {}
    for run in runs:
        by_key.setdefault(run.key, []).append(run)
    found = []
    for one in sorted(expected, key=lambda p: (p.model, p.ranks, p.plan)):
        same = tuple(run for run in by_key.get(one.key, ()) if run.hash == one.hash)
        if same:
            found.append(Row(one, same))
    return found


def at_usual_pace(runs: Iterable[Measured]) -> list[Measured]:
    """The runs of each model told at the pace that is in the middle of them.

    Fixed work takes up to 20 % more or less in one process than in another, whatever the machine
    does, and more between two steps than alone. So what it takes between the steps of one run is
    compared with what it takes in other runs, never with what it took elsewhere.
    """
    paces: dict[str, list[float]] = {}
    runs = list(runs)
    for run in runs:
        paces.setdefault(run.model, []).append(run.pace)
    return [_slower(run, median(paces[run.model])) for run in runs]


def _slower(run: Measured, factor: float) -> Measured:
    """Told of a machine that takes so many times as long."""
    return replace(
        run, pace=run.pace / factor, step_s=run.step_s * factor,
        steps_s=tuple(tuple(s * factor for s in rank) for rank in run.steps_s),
        seconds={kind: s * factor for kind, s in run.seconds.items()},
    )  # fmt: skip


def report(
    expected: Sequence[Predicted], runs: Sequence[Measured], machine: str, date: str, command: str
) -> str:
    """The whole page in Markdown."""
    rows = rows_of(expected, at_usual_pace(runs))
    if not rows:
        raise SystemExit("no run of a predicted plan is there: run `measure` first")
    models = {m: list(g) for m, g in groupby(rows, key=lambda row: row.predicted.model)}
    lines = ["# Predictions against runs", "", f"{date}; {machine}. `{command}`", ""]
    lines += [*_timestamps(rows, len(expected)), ""]
    lines += _table(
        ["", "plans", "step: median", "p90", "worst", "Spearman", "by the clock: median", "p90",
         "resident: median", "p90",
         "tensors: median", "p90", "noise: median"],
        [_summary(model, found) for model, found in models.items()] + [_summary("all", rows)]
        + [_summary(f"{n} processes", [r for r in rows if r.predicted.ranks == n])
           for n in sorted({r.predicted.ranks for r in rows})],
    )  # fmt: skip
    lines += ["", *_definitions()]
    for model, found in models.items():
        lines += ["", f"## Every plan: {model}", ""]
        lines += _table(
            ["plan", "ranks", "predicted s", "measured s", "error", "band", "noise", "pace", *KINDS,
             "resident MiB", "measured", "error", "tensors MiB", "measured", "error"],
            map(_details, found),
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _timestamps(rows: Sequence[Row], expected: int) -> list[str]:
    made: dict[str, list[str]] = {}
    started: dict[str, list[str]] = {}
    for row in rows:
        model = row.predicted.model
        made.setdefault(model, []).append(row.predicted.made_at)
        started.setdefault(model, []).extend(run.started_at for run in row.runs)
    late = [model for model in made if max(made[model]) > min(started[model])]
    order = f"NOT before the first run of {', '.join(late)}" if late else "before its first run"
    first, last = min(map(min, started.values())), max(map(max, started.values()))
    return [
        f"{len(rows)} of {expected} predicted plans were run, from {first} to {last}. "
        f"All predictions of a model were written {order}.",
    ]


def _definitions() -> list[str]:
    return [
        "Errors are absolute and relative to the measurement. Step time: median of the timed steps "
        "of the slowest rank, median over the runs of the plan. Noise: distance between the runs "
        "of one plan at different times of the session, relative to that. Pace: what fixed work "
        "took between the steps, relative to the middle of the model's runs: seconds are told at "
        "that pace, what the clock showed is their product with it; errors against that are given "
        f"too. A run in which it is more than {STEADY:.0%} away from that of the "
        "machine before the runs is made again. Resident: the "
        "kernel's high-water mark of the worst rank's process, libraries and the user's own model "
        "included; their part is measured once per model by a process that trains nothing. "
        "Tensors: bytes of live tensors of the worst rank. Spearman over all rows is not within a "
        "model and mixes sizes.",
        "",
        "In the tables of plans, the columns from forward to rest are predicted minus measured "
        "seconds of the rank that waits least, in percent of the measured step: they say where the "
        "error of the step comes from.",
    ]


def _summary(name: str, rows: Sequence[Row]) -> list[str]:
    steps = [abs(row.step_error) for row in rows]
    order = spearman([r.predicted.step_s for r in rows], [r.step_s for r in rows])
    return [
        name, str(len(rows)), _percent(median(steps)), _percent(quantile(steps, 0.9)),
        _percent(max(steps)), "-" if order is None else f"{order:.3f}",
        *_median_and_p90([row.clock_error for row in rows]),
        *_median_and_p90([row.resident_error for row in rows]),
        *_median_and_p90([row.tensor_error for row in rows]),
        _median_and_p90([row.noise for row in rows])[0],
    ]  # fmt: skip


def _median_and_p90(errors: Iterable[float | None]) -> list[str]:
    known = [abs(error) for error in errors if error is not None]
    return [_percent(quantile(known, share)) for share in (0.5, 0.9)] if known else ["-", "-"]


def _details(row: Row) -> list[str]:
    p = row.predicted
    return [
        p.plan, str(p.ranks), f"{p.step_s:.3f}", f"{row.step_s:.3f}", _signed(row.step_error),
        f"±{p.error_band:.0%}", "-" if row.noise is None else _percent(row.noise),
        f"{row.pace:.2f}", *(_signed(row.excess(kind)) for kind in KINDS),
        f"{p.resident_bytes / MIB:,.0f}", f"{row.resident_bytes / MIB:,.0f}",
        _signed(row.resident_error), f"{p.tensor_bytes / MIB:,.0f}",
        f"{row.tensor_bytes / MIB:,.0f}", _signed(row.tensor_error),
    ]  # fmt: skip


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
