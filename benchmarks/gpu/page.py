"""The page of a run: claims and verdicts first, then presets, then all facts.

Without a run it lists the claims, none of them measured.
"""

from collections.abc import Iterator, Sequence

from benchmarks.gpu.claim import Judged, judge
from benchmarks.gpu.results import DayRun, Result
from benchmarks.gpu.step import Step, Value

_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "s-1": ((1e12, "T/s"), (1e9, "G/s"), (1e6, "M/s"), (1.0, "/s")),
}
_ENDINGS = {"_per_s": "s-1", "_s": "s", "_bytes": "bytes", "share": "share"}
_ANYTHING = 9.0
"""An upper end of a ratio or a share that only says that more is better."""


def page(run: DayRun | None, steps: Sequence[Step]) -> str:
    """The page, as Markdown."""
    judged = [
        (step, judge(claim, run.facts(step.name) if run else {}))
        for step in steps
        for claim in step.claims
    ]
    title = "Claims, as a rehearsal would judge them" if run and run.rehearsal else "Claims"
    parts = ["# GPUs measured", _head(run), f"## {title}", _claims([one for _, one in judged])]
    if run:
        parts += [_steps(run, steps), *(_facts(result) for result in run.results if result.facts)]
    else:
        parts.append(_planned(steps))
    return "\n\n".join(parts) + "\n"


def _head(run: DayRun | None) -> str:
    command = "`python -m benchmarks.gpu --out RUN`, then `python -m benchmarks.gpu --page RUN`"
    if run is None:
        return f"**No GPU has run this yet.** {command} makes this page, in ten minutes. {_BEFORE}"
    facts = run.facts("environment")
    hardware = facts.get("machine", "unknown hardware")
    versions = ", ".join(
        f"{key.partition('/')[2]} {value}"
        for key, value in facts.items()
        if key.startswith("version/")
    )
    spent = sum(result.seconds for result in run.results)
    text = f"{run.begun}, {hardware}. Python {facts.get('python', '?')}, {versions}. {command}; "
    text += f"{spent:.0f} of {run.budget_s:.0f} s were used."
    warning = "**A rehearsal at tiny sizes on a CPU: nothing here is a measurement.** "
    return warning + text if run.rehearsal else text


_BEFORE = """Before, where all
packages are: `--prepare` searches the plans (`device-plans/`), with the torch and
transformers of that machine, or models that these trace otherwise are searched again there;
`--needs` says which wheels to bring (`device-wheels/`), `--rehearse` tries all steps on a CPU;
git ignores both folders. A file of `benchmarks/gpu/steps` is a step, with its claims beside it."""


def _claims(judged: Sequence[Judged]) -> str:
    count = {verdict: sum(one.verdict == verdict for one in judged) for verdict in _ORDER}
    said = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    rows = [
        (
            one.claim.text, f"[{one.claim.page}]({_linked(one.claim.page)})", _range(one),
            shown(one.measured, one.claim.unit), f"**{one.verdict}**",
        )
        for verdict in _ORDER
        for one in judged
        if one.verdict == verdict
    ]  # fmt: skip
    text = f"Of {len(judged)} claims: {said}.\n\n"
    return text + table(("claim", "page", "said", "measured", ""), rows)


_ORDER = ("refuted", "confirmed", "not measured")


def _linked(target: str) -> str:
    """A page below `docs`, seen from `docs/results`."""
    return target.removeprefix("results/") if target.startswith("results/") else f"../{target}"


def _range(one: Judged) -> str:
    if one.low is None or one.high is None:
        return "-"
    low, high = (shown(value, one.claim.unit) for value in (one.low, one.high))
    if one.low == one.high:
        return low
    if one.high >= _ANYTHING and not one.claim.unit:
        return f"at least {low}"
    return f"at most {high}" if one.low == 0 else f"{low} to {high}"


def _steps(run: DayRun, steps: Sequence[Step]) -> str:
    does = {step.name: step.does for step in steps}
    rows = [
        (
            result.step, does.get(result.step, ""), result.status,
            f"{result.seconds:.1f} of {result.limit_s:.0f}" if result.limit_s else "-",
            result.why,
        )
        for result in run.results
    ]  # fmt: skip
    return "## Steps\n\n" + table(("step", "what", "end", "seconds", "why"), rows)


def _planned(steps: Sequence[Step]) -> str:
    rows = [
        (step.name, step.does, f"{step.limit_s:.0f}", str(step.gpus) if step.gpus > 1 else "1")
        for step in steps
    ]
    return "## Steps\n\n" + table(("step", "what", "seconds at most", "GPUs"), rows)


def _facts(result: Result) -> str:
    """All that a step found: single facts, then a table of those that have a row and a column."""
    rows: dict[str, dict[str, Value]] = {}
    single = []
    for key, value in result.facts.items():
        row, slash, column = key.partition("/")
        if slash:
            rows.setdefault(row, {})[column] = value
        else:
            single.append(f"- {key.replace('_', ' ')}: {shown(value, unit_of(key))}")
    text = f"## {result.step.replace('_', ' ')}"
    if single:
        text += "\n\n" + "\n".join(single)
    for columns, names in _alike(rows):
        cells = [[name, *(shown(rows[name][c], unit_of(c)) for c in columns)] for name in names]
        text += "\n\n" + table(("", *(c.replace("_", " ") for c in columns)), cells)
    return text


def _alike(rows: dict[str, dict[str, Value]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Rows that have the same columns, in the order of their first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, columns in rows.items():
        found.setdefault(tuple(columns), []).append(name)
    yield from found.items()


def unit_of(key: str) -> str:
    """The unit that a key's last word says."""
    return next((unit for ending, unit in _ENDINGS.items() if key.endswith(ending)), "")


def shown(value: object, unit: str = "") -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value).replace("|", "/").replace("\n", " ")
    if unit == "share":
        return f"{value:.1%}"
    for scale, name in _SCALES.get(unit, ()):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
