"""The page of the zoo: a row per model, the reason of each failure, and how many passed."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.zoo.run import BAR, STEPS, Tried

COLUMNS = (
    "model", "parameters", "ops", "blocks", "plan found", "largest difference", "with tp=2",
    "largest difference", "seconds",
)  # fmt: skip


def page(free: Sequence[Tried], pinned: Sequence[Tried], command: str, known: int) -> str:
    """Markdown; `free` was searched as it is, `pinned` to data and tensor parallelism."""
    families = list(dict.fromkeys(one.family for one in free))
    beside = {one.name: one for one in pinned}
    lines = [
        *_head(free, pinned, command, known),
        *(line for family in families for line in _table(free, beside, family)),
        *_failures(free, pinned),
        *_by_trying(pinned),
    ]
    return "\n".join(lines) + "\n"


def _used(tried: Sequence[Tried]) -> list[Tried]:
    return [one for one in tried if one.passed and one.ranks == 4]


def _head(
    free: Sequence[Tried], pinned: Sequence[Tried], command: str, known: int
) -> Iterator[str]:
    hf = sum(one.family != "plain" for one in free)
    yield "# Model zoo"
    yield ""
    yield (
        f"{len(free)} of the zoo's {known} models were run: {hf} tiny configs of architectures of "
        "transformers 5.x, and plain PyTorch. Each is traced, searched for 4 local processes, "
        f"compiled, and trained for {STEPS} Adam steps on 4 Gloo processes in float64; losses, "
        "parameters and buffers are compared with plain training in one process (bar: "
        f"{BAR:g}, relative)."
    )
    yield ""
    for tried, how in ((free, "the plan that the search finds"), (pinned, "`pp=1 tp=2`")):
        passed = len(_used(tried))
        yield (
            f"- **{passed} of {len(tried)} pass ({passed / len(tried):.1%})** on all 4 devices "
            f"with {how}."
        )
    yield ""
    yield (
        "None is named in the code: what a model needed was mended in tracer, rules, code "
        "generation or runtime for all. Left alone, a search gives most of these tiny models "
        "pipelines or pure data parallelism; the pin makes every model run data and tensor "
        "parallel. Left out are architectures that draw random numbers in training (phimoe) and "
        "those that insist on float32 (nllb_moe)."
    )
    yield ""
    yield f"Commands: {command}. 22 Nov 2026, this machine (2 cores, no GPU, shared with others"
    yield "while this ran, so that seconds are upper bounds: trace, search, both trainings)."
    yield ""


def _table(free: Sequence[Tried], beside: Mapping[str, Tried], family: str) -> Iterator[str]:
    yield f"## {family[0].upper()}{family[1:]}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"| {' | '.join('---' if 'plan' in c or c in _WORDS else '---:' for c in COLUMNS)} |"
    for one in free:
        if one.family == family:
            other = beside.get(one.name)
            yield (
                f"| {one.name} | {one.parameters:,} | {one.ops} | {one.blocks} | {one.plan} | "
                f"{_error(one)} | {other.plan if other else ''} | {_error(other)} | "
                f"{one.seconds:.1f} |"
            )
    yield ""


_WORDS = ("model", "with tp=2")


def _error(one: Tried | None) -> str:
    if one is None:
        return "not run"
    return f"{one.error:.1e}" if one.error == one.error else f"fails: {one.step}"


def _failures(free: Sequence[Tried], pinned: Sequence[Tried]) -> Iterator[str]:
    yield "## What fails, and why"
    yield ""
    reasons: dict[tuple[str, str], list[str]] = {}
    for tried, how in ((free, "as found"), (pinned, "with tp=2")):
        used = {one.name for one in _used(tried)}
        for one in tried:
            if one.name not in used:
                reasons.setdefault((one.name, f"{one.step}: {_clean(one)}"), []).append(how)
    for (name, reason), hows in reasons.items():
        yield f"- **{name}** ({' and '.join(hows)}), {reason}"
    if not reasons:
        yield "Nothing."


def _clean(one: Tried) -> str:
    """Without the folders of this machine."""
    words = (word.split("site-packages/")[-1] for word in one.reason.split(" "))
    if not one.reason:
        return f"its plan uses {one.ranks} devices"
    return " ".join(words)


def _by_trying(tried: Sequence[Tried]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for one in tried:
        for target in one.by_trying:
            found.setdefault(target, []).append(one.name)
    if found:
        yield ""
        yield "## Operators whose rules were found by trying"
        yield ""
        yield from (f"- `{target}`: {', '.join(names)}" for target, names in sorted(found.items()))
