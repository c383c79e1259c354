"""Commands that trace the model, search or would start ranks, on spoiled files.

Those that trace or search take a second or more each, so that one file in `EVERY` meets one. Those
that would start ranks or measure for minutes are given only files that must be refused before.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from shutil import copy

from benchmarks.attack.files_bases import TARGET, Bases
from benchmarks.attack.files_commands import Outcome, command, judged, python_injection
from meshwright.codegen.lower.lower import lower
from meshwright.ir.plan.plan import Plan
from meshwright.tools.dry.run import dry_run
from meshwright.tools.export.export import TARGETS

EVERY = 60
SEARCH_S = 60.0
"""Of computing, for searches and dry runs: they have limits of their own."""
_LOCAL = "local:4"
_SHORT = ("--time-limit", "1")


def of_plan(bases: Bases, path: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A plan that can be read, through one of the commands that take a model."""
    if random.randrange(EVERY):
        return
    model, plan = ("--model", TARGET), str(path)
    known = str(copy(bases.profile, folder / "known.db"))
    priced = ("--profile", known, "-o", str(folder / "priced.json"))
    yield command(*random.choice((
        ("check", plan, *model), ("check", plan, *model, "-c", _LOCAL, *priced),
        ("check", plan, *model, "-c", _LOCAL, "--rehash", "--dry-run"),
        ("compare", plan, str(bases.run), *model, "-c", _LOCAL),
        ("compare", plan, str(bases.run), *model, "--learn", known),
        ("explain", plan, *model, "-c", _LOCAL, *_SHORT),
        ("export", plan, *model, "--to", random.choice(TARGETS), "--save", str(folder / "save")),
    )), limit_s=SEARCH_S)  # fmt: skip


def of_cluster(bases: Bases, path: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A cluster that can be read, through one of them."""
    if random.randrange(EVERY):
        return
    plan, machines, out = str(bases.plans[0]), ("-c", str(path)), ("-o", str(folder / "out.json"))
    yield command(*random.choice((
        ("search", TARGET, *machines, "-b", "8", *_SHORT, *out),
        ("check", plan, "--model", TARGET, *machines, *out),
        ("check", str(bases.hand), "--model", TARGET, *machines, *_SHORT, *out),
        ("explain", plan, "--model", TARGET, *machines, *_SHORT),
    )), limit_s=SEARCH_S)  # fmt: skip


def of_profile(bases: Bases, path: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A profile, through one of them."""
    if random.randrange(EVERY):
        return
    plan, local, out = str(bases.plans[0]), ("-c", _LOCAL), ("-o", str(folder / "out.json"))
    yield command(*random.choice((
        ("search", TARGET, *local, "-b", "8", "--profile", str(path), *_SHORT, *out),
        ("check", plan, "--model", TARGET, *local, "--profile", str(path), *out),
        ("compare", plan, str(bases.run), "--model", TARGET, "--profile", str(path)),
        ("compare", plan, str(bases.run), "--model", TARGET, "--learn", str(path)),
    )), limit_s=SEARCH_S)  # fmt: skip


def of_run(bases: Bases, run: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A run folder, with which a plan is priced again and a profile taught."""
    if random.randrange(EVERY):
        return
    known = str(copy(bases.profile, folder / "known.db"))
    more = random.choice(((), ("--learn", known), ("--profile", known)))
    yield command("compare", str(bases.plans[0]), str(run), "--model", TARGET, *more,
                  limit_s=SEARCH_S)  # fmt: skip


def refused_plan(bases: Bases, path: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A plan that cannot be read starts no rank."""
    out, sound = ("-o", str(folder / "never")), str(bases.plans[0])
    save = ("--save", str(folder / "save"))
    yield command(*random.choice((
        ("run", str(path), TARGET, *out), ("run", str(path), TARGET, "--elastic", *save, *out),
        ("race", TARGET, str(path), sound, *out), ("race", TARGET, sound, str(path), *out),
    )))  # fmt: skip


def refused_cluster(path: Path, folder: Path, random: Random) -> Iterator[Outcome]:
    """A cluster that cannot be read is neither searched nor measured."""
    out = ("-o", str(folder / "never"))
    yield command(*random.choice((
        ("profile", "-c", str(path), *out), ("search", TARGET, "-c", str(path), *out),
    )))  # fmt: skip


def stepped(bases: Bases, plan: Plan) -> Outcome:
    """A sound plan: all its ranks, on tensors without memory."""
    return judged(lambda: len(dry_run(plan, bases.graph).ranks) * 0, "dry", SEARCH_S)


def lowered(bases: Bases, plan: Plan, random: Random) -> Iterator[str]:
    """A sound plan: problems of the Python of one of its ranks."""
    rank = random.randrange(plan.world_size)
    sources: list[str] = []

    def called() -> int:
        sources.extend(program.source for program in lower(bases.graph, plan, rank))
        return 0

    if problem := judged(called, "lower", SEARCH_S).problem:
        yield problem
    for source in sources:
        if found := python_injection(source):
            yield f"lower: {found}"
