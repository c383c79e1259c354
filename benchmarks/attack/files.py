"""Spoiled plans, clusters, profiles and run folders through every command.

What holds ends in words: no foreign exception, no hang over 5 s, no jump of memory over 1 GB,
nothing of a file that a shell, YAML, Python, a browser or a terminal takes for its own.
"""

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from benchmarks.attack import files_slow as slow
from benchmarks.attack.files_bases import TARGET, Bases, make_bases, sound
from benchmarks.attack.files_commands import Outcome, command, exported, html_injection, judged
from benchmarks.attack.files_mutate import EVIL, EXTREMES, json_text, mutated, scribbled
from benchmarks.attack.result import Result
from meshwright.arguments.targets import load_cluster
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.remaining import without
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import verify
from meshwright.ir.profile.profile_store import load_profile
from meshwright.planner.problem.problem import make_problem
from meshwright.tools.export.export import TARGETS
from meshwright.tools.race import standing

FULL = 100_000
"""Spoiled files at size 100: one to two hours on a core of its own."""
DRY_EVERY = 25
"""Dry runs take long: of so many plans that are still sound one is stepped."""


def attacks(size: int, seed: int) -> Iterator[Result]:
    """One result for each spoiled file; its name is enough to make it again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases = make_bases(folder)
        (folder / "x").mkdir()
        for arguments in sound(bases):
            done = command(*arguments)
            yield Result(" ".join(arguments[:1]), not done.code, done.text.strip()[-200:])
        for number in range(max(1, FULL * size // 100)):
            yield attack(bases, folder / "x", seed, number)


def attack(bases: Bases, folder: Path, seed: int, number: int) -> Result:
    """The spoiled file of this number through the commands that read such files."""
    random = Random(f"{seed} {number}")
    kind, tried = random.choices(_KINDS, _SHARES)[0]
    started = time.perf_counter()
    problems = list(tried(bases, folder, random))
    seconds = time.perf_counter() - started
    what = "; ".join(problems) or "refused or right"
    return Result(f"{kind} {number} of seed {seed}", not problems, what, seconds)


def _plan(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    source = random.choice(bases.plans)
    path = folder / "plan.json"
    if random.random() < 0.2:
        path.write_bytes(scribbled(source.read_bytes(), random))
    else:
        path.write_text(json_text(mutated(json.loads(source.read_text()), random)))
    yield from _problems(command("check", str(path), *random.choice(((), ("--json",)))))
    try:
        plan = plan_io.load(path, check_hash=False)
        plan_io.save(plan, path)
    except PlanError:
        yield from _problems(command(random.choice(("show", "explain")), str(path)))
        yield from _all(slow.refused_plan(bases, path, folder, random))
        return
    yield from _read(bases, folder, path, plan, random)


def _read(bases: Bases, folder: Path, path: Path, plan: Plan, random: Random) -> Iterator[str]:
    """A plan that can be read, through all that reads plans."""
    page, traced, other = folder / "page.html", folder / "trace.json", str(bases.plans[0])
    page.unlink(missing_ok=True)
    for arguments in (
        ("show", str(path), *random.choice(((), (), (), ("--json",)))), ("check", str(path)),
        ("explain", str(path)), ("diff", *random.choice(((other, str(path)), (str(path), other)))),
        ("report", str(path), "-o", str(page), "--trace", str(traced)),
        ("report", str(path), "-o", str(page), "--run", str(bases.run)),
        ("compare", str(path), str(bases.run)),
        ("export", str(path), "--to", random.choice(TARGETS)),
    ):  # fmt: skip
        yield from _problems(command(*arguments))
    yield from _all(slow.of_plan(bases, path, folder, random))
    if page.exists() and (found := html_injection(page.read_text())):
        yield f"report: {found}"
    yield from _problems(judged(lambda: len(plan.verify(bases.graph, bases.cluster)) * 0, "verify"))
    same = plan.cluster.fingerprint == bases.cluster.fingerprint
    errors = [] if not same else [f for f in _verified(plan, None, None) if f.severity == "error"]
    if same and not errors:
        yield from exported(plan, bases.cluster)
        whole = [f for f in _verified(plan, bases.graph, bases.cluster) if f.severity == "error"]
        if not whole:
            yield from slow.lowered(bases, plan, random)
            if random.randrange(DRY_EVERY) == 0:
                yield from _problems(slow.stepped(bases, plan))


def _verified(plan: Plan, graph: Any, cluster: Any) -> Any:
    return verify(plan, graph, cluster)


def _hand(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    path = folder / "hand.json"
    if random.random() < 0.2:
        path.write_bytes(scribbled(bases.hand.read_bytes(), random))
    else:
        path.write_text(json_text(mutated(json.loads(bases.hand.read_text()), random)))
    yield from _problems(command("check", str(path)))
    if random.randrange(12) == 0:
        arguments = ("--model", TARGET, "-c", "local:4", "--time-limit", "1")
        yield from _problems(command("check", str(path), *arguments, limit_s=slow.SEARCH_S))


def _cluster(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    source, path = random.choice(bases.clusters), folder / "cluster.yaml"
    if random.random() < 0.3:
        path.write_bytes(scribbled(source.read_bytes(), random))
    else:
        data = mutated(yaml.safe_load(source.read_text()), random)
        path.write_text(yaml.dump(data), encoding="utf-8", errors="surrogateescape")

    def called() -> int:
        cluster = load_cluster(str(path))
        cluster.save(folder / "again.yaml")
        again = Cluster.load(folder / "again.yaml")
        assert again.fingerprint == cluster.fingerprint, "another cluster after save and load"
        cluster.tier(range(min(cluster.num_devices, 64)))
        if cluster.num_devices > 1:
            without(cluster, [random.randrange(cluster.num_devices)])
        make_problem(bases.graph, cluster, precision="fp32")
        verify(plan_io.load(bases.plans[0]), bases.graph, cluster)
        return 0

    outcome = judged(called, "cluster")
    yield from _problems(outcome)
    if outcome.code:
        yield from _all(slow.refused_cluster(path, folder, random))
        return
    yield from _problems(command(*random.choice((
        ("check", str(bases.plans[0]), "-c", str(path)),
        ("export", str(bases.plans[0]), "--to", random.choice(TARGETS), "-c", str(path)),
    ))))  # fmt: skip
    yield from _all(slow.of_cluster(bases, path, folder, random))


def _profile(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    path = folder / "profile.db"
    shutil.copy(bases.profile, path)
    if random.random() < 0.5:
        path.write_bytes(scribbled(path.read_bytes(), random))
    else:
        _update(path, random)

    def called() -> int:
        profile = load_profile(path)
        make_problem(bases.graph, bases.cluster, precision="fp32", profile=profile)
        return 0

    yield from _problems(judged(called, "profile"))
    yield from _all(slow.of_profile(bases, path, folder, random))


def _update(path: Path, random: Random) -> None:
    """Changes a cell, a table or what the database says of itself."""
    connection = sqlite3.connect(path)
    try:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
        table = random.choice([name for name in tables if not name.startswith("sqlite_")])
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        value = random.choice((*EVIL, *EXTREMES, b"\xff", "[[1], [2, 3]]", "[[null]]", "{}"))
        match random.randrange(6):
            case 0:
                connection.execute(f"DROP TABLE {table}")
            case 1:
                connection.execute(
                    f"ALTER TABLE {table} RENAME COLUMN {random.choice(columns)} TO x"
                )
            case 2:
                connection.execute(random.choice((
                    "CREATE VIEW v AS SELECT 1", "PRAGMA user_version = 99",
                    "PRAGMA application_id = 5",
                    f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
                )))  # fmt: skip
            case _:
                connection.execute(f"UPDATE {table} SET {random.choice(columns)} = ?", (value,))
        connection.commit()
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):
        pass  # SQLite itself refuses to write it
    finally:
        connection.close()


def _run(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(bases.run, run)
    for path in random.sample(sorted(run.iterdir()), random.choice((1, 1, 2, 4))):
        match random.randrange(10):
            case 0 | 1:
                path.write_bytes(scribbled(path.read_bytes(), random))
            case 2:
                path.unlink()
            case 3:
                (run / f"measured_rank{random.randrange(9)}.json").write_bytes(path.read_bytes())
            case _:
                data = mutated(json.loads(path.read_text()), random)
                path.write_text(json_text(data), errors="surrogatepass")
    plan = str(bases.plans[0])
    yield from _problems(command("compare", plan, str(run), *random.choice(((), ("--json",)))))
    page = folder / "run.html"
    page.unlink(missing_ok=True)
    yield from _problems(command("report", plan, "-o", str(page), "--run", str(run)))
    if page.exists() and (found := html_injection(page.read_text())):
        yield f"report: {found}"
    yield from _all(slow.of_run(bases, run, folder, random))


def _journal(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    """What a race that was broken off left."""
    path, hashes = folder / "plan.race", ["a", "b", "c"]
    heats = tuple(standing.Heat(n, t, (0.1 + n, 0.2)) for n in range(3) for t in range(2))
    standing.save(standing.RaceStanding(plans=tuple(hashes), heats=heats, running=1), path)
    if random.random() < 0.3:
        path.write_bytes(scribbled(path.read_bytes(), random))
    else:
        path.write_text(json_text(mutated(json.loads(path.read_text()), random)))

    def called() -> int:
        read = standing.load(path, hashes).gone_on()
        read.next_up(3)
        return len(read.order) * 0

    yield from _problems(judged(called, "race"))


def _words(bases: Bases, folder: Path, random: Random) -> Iterator[str]:
    """What a command line names."""
    text = random.choice((
        *EVIL, "local:0", f"local:{random.randrange(10**random.randrange(1, 15))}", "/dev/zero",
        f"a100-80:{random.randrange(10**7)}x{random.randrange(10**4)}", "l4:1x2x3", str(folder),
        f"{folder}/nothing.yaml", "a100-81:2x2",
    ))  # fmt: skip
    if "\x00" in text or "\ud800" in text:
        return  # no command line can hold it

    def called() -> int:
        load_cluster(text)
        return 0

    yield from _problems(judged(called, "cluster"))
    yield from _problems(command("show", text))
    yield from _problems(command("check", str(bases.plans[0]), "-c", text))


def _problems(outcome: Outcome) -> Iterator[str]:
    if outcome.problem:
        yield outcome.problem


def _all(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield from _problems(outcome)


Tried = Callable[[Bases, Path, Random], Iterator[str]]
_KINDS: tuple[tuple[str, Tried], ...] = (
    ("plan", _plan), ("plan by hand", _hand), ("cluster", _cluster), ("profile", _profile),
    ("run folder", _run), ("word", _words), ("journal", _journal),
)  # fmt: skip
_SHARES = (45, 10, 20, 10, 11, 2, 2)
