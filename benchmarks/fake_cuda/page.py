"""The page of what was found."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from statistics import median

from benchmarks.fake_cuda.plans import GROUPS, LISTED, Entry, entries
from benchmarks.fake_cuda.run import Result
from meshwright.testing.fake_gpu.process import Calls

Found = Mapping[Entry, Result]
HEAD = """# Plans of GPUs on a GPU that is not there

`python -m benchmarks.fake_cuda --done FOLDER --out docs/results/fake_cuda.md`, {day}. Nothing is
measured: tensors have no memory, collectives no peers, kernels of Triton are not launched. Two
steps are taken of one rank of each kind, of H100, each in a process of its own, and this is noted
in the second: what the host waits for, what two streams do to one memory in no order, operators
with operands of the host and of the device, places of emitted code that make tensors of the host,
and how often the host looks back at the step before (four times, once it is over). The first
group is of all plans of `tests/test_equality.py`'s lists (33, and 6 whose gathers go under the
next step), for GPT-2 and Llama, in float32 with the models' own operators and in bf16 with all
kernels. The others vary one thing each. A run that is broken off goes on (`--done` keeps what is
there): {run}

Not tried here: blocks that torch compiles, CUDA graphs, rows of tables and caches, dropout. Those
that need values (how many rows there are, say) cannot be run without. What waits and says so:
stores on the host, whose optimizer steps there, and `bucket_update` in fp16, once a step.
"""
CALLS = """Of the rank that calls most: operators of torch, forward and backward, views and what
makes memory among them; those that the device has to do something for; collectives and messages
among these."""
_KINDS = "failed", "waits", "race", "mixed", "looks"


def page(found: Found) -> str:
    """The whole of `docs/results/fake_cuda.md`."""
    whole = len(entries())
    left = whole - len(found)
    run = (
        f"**{left} of {whole} plans have not been run yet**."
        if left
        else f"all {whole} plans were."
    )
    head = HEAD.format(day=f"{date.today():%d %B %Y}", run=run)
    parts = [
        head, *_groups(found), "", "## What the host calls in a step", "", CALLS, "",
        *_calls(found), "", "## Not sound", "", *_unsound(found), "", "## Refused", "",
        *_refused(found),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _groups(found: Found) -> Iterator[str]:
    yield "| group | plans | refused by a rule | run | kinds of ranks | sound | wait as they say | need values | fail | wait | race | mix | look back too often |"  # noqa: E501
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for group in GROUPS:
        of = [result for entry, result in found.items() if entry.group == group]
        if of:
            yield _row(group, of)
    yield _row("all", list(found.values()))


def _row(name: str, of: Sequence[Result]) -> str:
    ran = [x for x in of if x.ranks]
    counts = [sum(_has(x, kind) for x in ran) for kind in _KINDS]
    shown = (
        name, len(of), sum(bool(x.refused) for x in of), len(ran), sum(len(x.ranks) for x in ran),
        sum(x.sound for x in ran), sum(x.waits_as_said for x in ran),
        sum(bool(x.asks) for x in ran), *counts,
    )  # fmt: skip
    return f"| {' | '.join(map(str, shown))} |"


def _has(result: Result, kind: str) -> bool:
    return any(fault.startswith(kind) for fault in result.faults)


def _calls(found: Found) -> Iterator[str]:
    listed = {entry: result for entry, result in found.items() if entry.group == LISTED}
    settings = list(dict.fromkeys(entry.setting for entry in listed))
    yield f"| plan | {' | '.join(map(str, settings))} |"
    yield f"|---|{'---|' * len(settings)}"
    counts: dict[str, dict[object, str]] = {}
    for entry, result in listed.items():
        counts.setdefault(entry.kind, {})[entry.setting] = _busiest(result)
    for kind, of in counts.items():
        yield f"| {kind} | {' | '.join(of.get(x, '-') for x in settings)} |"
    both = [_most(result) for result in listed.values() if result.sound]
    if both:
        yield ""
        yield (
            f"In the middle of all {len(both)}: {median(x.operators for x in both):.0f} operators, "
            f"{median(x.launches for x in both):.0f} launches, "
            f"{median(x.messages for x in both):.0f} messages."
        )


def _most(result: Result) -> Calls:
    return max((seen.calls for _, seen in result.ranks), key=lambda x: x.operators)


def _busiest(result: Result) -> str:
    if not result.sound:
        return "-"
    most = _most(result)
    return f"{most.operators}, {most.launches}, {most.messages}"


def _unsound(found: Found) -> Iterator[str]:
    for entry, result in found.items():
        if result.faults:
            yield f"- {entry.name}: {'; '.join(result.faults)}"
        elif result.asks:
            yield f"- {entry.name}: needs values, of {result.asks}"
        elif result.waits_as_said:
            yield f"- {entry.name}: waits for gradients, as its store says"


def _refused(found: Found) -> Iterator[str]:
    """By what is said, the plans."""
    said: dict[str, list[str]] = {}
    for entry, result in found.items():
        if result.refused:
            said.setdefault(_first(result.refused), []).append(entry.name)
    yield "| what is said | plans |"
    yield "|---|---|"
    for text, names in sorted(said.items()):
        yield f"| {text} | {len(names)}: {'; '.join(names)} |"


def _first(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[1] if len(lines) > 1 else lines[0]).replace("|", "\\|")
