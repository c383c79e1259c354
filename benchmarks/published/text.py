"""The report as text for a terminal and as markdown."""

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.published.notes import HEAD, LOG
from benchmarks.published.parts import CALIBRATION, REPORT
from benchmarks.published.report import (
    Case,
    Errors,
    Result,
    errors,
    feasibility,
    spearman,
    widening,
)
from benchmarks.published.rows import Row, Skip

_WORST = 8


def told(end: Case | Skip) -> str:
    """Returns a row's figures, or why it was left out."""
    return _row(end) if isinstance(end, Case) else f"{end.index:4} left out: {end.reason}"


def terminal(result: Result) -> str:
    """One table's figures, what was left out, and its worst rows."""
    lines = [f"{result.name}: {len(result.cases)} rows predicted, {len(result.skipped)} left out"]
    lines += [f"  {line}" for line in _figures(result)]
    lines += [f"  left out {n} x: {why}" for why, n in _reasons(result)]
    lines += [f"  {_row(case)}" for case in _worst(result)]
    return "\n".join(lines)


def _figures(result: Result) -> list[str]:
    lines = []
    if time := errors(c.time_error for c in result.cases):
        pairs = [(c.prediction.step_s, c.row.step_s) for c in result.cases if c.row.step_s]
        rank = spearman(pairs)
        lines.append(f"step time {_errors(time)}" + (f" rank {rank:.3f}" if rank else ""))
        lines.append(f"  within the band that the plan states: {_held(result)}")
        lines += _subsets(result)
    without = Counter(case.row.untimed for case in result.cases if case.row.untimed)
    lines += [f"  no time to compare {n:4}: {why}" for why, n in without.most_common()]
    if memory := errors(c.memory_error for c in result.cases):
        lines.append(f"memory    {_errors(memory)}")
    fits = feasibility(result.cases)
    if any(not ran for ran, _ in fits):
        lines.append(
            f"fits: ran and fits {fits[True, True]}, ran but predicted out of memory "
            f"{fits[True, False]}, out of memory and predicted so {fits[False, False]}, "
            f"out of memory but predicted to fit {fits[False, True]}"
        )
    return lines


_SUBSETS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("calibration", lambda row: row.part == CALIBRATION),
    ("report", lambda row: row.part == REPORT),
    ("tp 1", lambda row: row.parallel.tp == 1),
    ("tp > 1, pp 1", lambda row: row.parallel.tp > 1 and row.parallel.pp == 1),
    ("tp > 1, pp > 1", lambda row: row.parallel.tp > 1 and row.parallel.pp > 1),
)


def _subsets(result: Result) -> list[str]:
    """Step time by the kinds of parallelism, where a table has several."""
    lines = []
    for name, holds in _SUBSETS:
        found = errors(case.time_error for case in result.cases if holds(case.row))
        if found and found.count < len(result.cases):
            lines.append(f"  {name:14} {_errors(found)}")
    return lines


def _errors(e: Errors) -> str:
    return (
        f"n {e.count:4} median {e.median_abs:6.1%} p90 {e.p90:6.1%} worst {e.worst:6.1%} "
        f"bias {e.bias:+6.1%} within 8 % {e.within_8:4.0%} within 25 % {e.within_25:4.0%}"
    )


def _reasons(result: Result) -> list[tuple[str, int]]:
    return Counter(skip.reason for skip in result.skipped).most_common()


def _worst(result: Result) -> list[Case]:
    timed = [case for case in result.cases if case.time_error is not None]
    return sorted(timed, key=lambda c: -abs(c.time_error or 0))[:_WORST]


def _row(case: Case) -> str:
    row, made = case.row, case.prediction
    parts = [f"{row.index:4} {row.gpus:5} GPUs {row.label:48.48}"]
    if case.time_error is not None:
        parts.append(f"{row.step_s:9.3f} s -> {made.step_s:9.3f} {case.time_error:+7.1%}")
    if case.memory_error is not None:
        gib = (row.peak_bytes or 0) / 2**30
        parts.append(f"{gib:6.1f} GiB -> {case.peak_bytes / 2**30:6.1f} {case.memory_error:+7.1%}")
    return " ".join(parts)


def markdown(results: Sequence[Result]) -> str:
    """The summary table and one section per table."""
    lines = [HEAD, "| table | n | median | p90 | worst | bias | within 8 % | within 25 % | in band "
             "| rank |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [_cells(r.name, errors(c.time_error for c in r.cases), *_last(r)) for r in results]
    lines += ["", "Memory:", "", "| table | n | median | p90 | worst | bias | within 8 % | "
              "within 25 % |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [
        _cells(r.name, found) for r in results if (found := errors(c.memory_error for c in r.cases))
    ]
    for result in results:
        lines += ["", *_section(result)]
    lines += ["", LOG.rstrip()]
    return "\n".join(lines) + "\n"


def _cells(name: str, e: Errors | None, *last: str) -> str:
    if e is None:
        return f"| {name} | 0 |" + " |" * (6 + len(last))
    figures = [e.median_abs, e.p90, e.worst]
    shown = [f"{f:.1%}" for f in figures] + [f"{e.bias:+.1%}", f"{e.within_8:.0%}"]
    return f"| {name} | {e.count} | " + " | ".join([*shown, f"{e.within_25:.0%}", *last]) + " |"


def _last(result: Result) -> tuple[str, str]:
    """Share of rows within the stated band, and rank correlation."""
    timed = [(c.prediction.step_s, c.row.step_s) for c in result.cases if c.row.step_s]
    rank = spearman(timed)
    return _held(result), "" if rank is None else f"{rank:.3f}"


def _held(result: Result) -> str:
    """Share of rows within their bands, and how many times as wide these would have to be."""
    held = [case.in_band for case in result.cases if case.in_band is not None]
    times = widening(result.cases)
    if times is None:
        return ""
    return f"{sum(held) / len(held):.0%} (x {times:.2f})"


def _section(result: Result) -> list[str]:
    lines = [f"## {result.name}", "", f"{len(result.cases)} rows predicted, "
             f"{len(result.skipped)} left out."]  # fmt: skip
    lines += [f"- left out {n}: {why}" for why, n in _reasons(result)]
    figures = [f"    {line}" for line in _figures(result)]
    worst = [f"    {_row(case)}" for case in _worst(result)]
    return [*lines, "", *figures, "", "Worst:", "", *worst]
