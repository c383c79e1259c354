"""The page of the zoo: a row per model, the reason of each failure, and how many passed."""

from collections.abc import Iterator, Sequence

from benchmarks.zoo.run import BAR, STEPS, Tried

COLUMNS = (
    "model", "parameters", "ops", "blocks", "plan", "largest difference", "seconds",
)  # fmt: skip


def page(tried: Sequence[Tried], command: str, known: int) -> str:
    """Markdown."""
    families = list(dict.fromkeys(one.family for one in tried))
    used = [one for one in tried if one.passed and one.ranks == 4]
    lines = [
        *_head(tried, len(used), command, known),
        *(line for family in families for line in _table(tried, family)),
        *_failures([one for one in tried if one not in used]),
        *_by_trying(tried),
    ]
    return "\n".join(lines) + "\n"


def _head(tried: Sequence[Tried], passed: int, command: str, known: int) -> Iterator[str]:
    hf = sum(one.family != "plain" for one in tried)
    yield "# Model zoo"
    yield ""
    yield (
        f"{len(tried)} of the zoo's {known} models were run: {hf} tiny configs of architectures of "
        "transformers 5.x, and plain PyTorch. Each is traced, searched for 4 local processes, "
        f"compiled, and trained for {STEPS} Adam steps on 4 Gloo processes in float64; losses, "
        "parameters and buffers are compared with plain training in one process (bar: "
        f"{BAR:g}, relative)."
    )
    yield ""
    yield (
        f"**{passed} of {len(tried)} pass ({passed / len(tried):.1%}) with a plan that uses all 4 "
        "devices.** None is named in the code: what a model needed was mended in tracer, rules, "
        "code generation or runtime for all."
    )
    yield ""
    yield (
        "The search is pinned to one stage and `tp=2`, so that every model runs data and tensor "
        "parallel: left alone, a search gives most of these tiny models pipelines or pure data "
        "parallelism. Left out are architectures that draw random numbers in training (phimoe) and "
        "those that insist on float32 (nllb_moe)."
    )
    yield ""
    yield f"Command: `{command}`. 21 Nov 2026, this machine (2 cores, no GPU, shared with others"
    yield "while this ran, so that seconds are upper bounds: trace, search, both trainings)."
    yield ""


def _table(tried: Sequence[Tried], family: str) -> Iterator[str]:
    yield f"## {family[0].upper()}{family[1:]}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"| {' | '.join('---:' if c not in ('model', 'plan') else '---' for c in COLUMNS)} |"
    for one in tried:
        if one.family == family:
            error = f"{one.error:.1e}" if one.error == one.error else f"fails: {one.step}"
            yield (
                f"| {one.name} | {one.parameters:,} | {one.ops} | {one.blocks} | {one.plan} | "
                f"{error} | {one.seconds:.1f} |"
            )
    yield ""


def _failures(failed: Sequence[Tried]) -> Iterator[str]:
    yield "## What fails, and why"
    yield ""
    for one in failed:
        yield f"- **{one.name}** ({one.step}): {_clean(one)}"
    if not failed:
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
