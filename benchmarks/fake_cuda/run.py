"""Runs plans and keeps what was found."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from benchmarks.fake_cuda.plans import Entry
from meshwright.ir.errors import PlanError
from meshwright.testing.fake_gpu.process import LOOKS, STEPS, Seen, Task, each_seen, seen_of
from meshwright.tools.dry.classes import rank_classes

TOGETHER = 40
"""Plans for which torch is loaded once."""
_ASKS = "DynamicOutputShapeException", "DataDependentOutputException"
"""What torch raises where the host needs a value, and a tensor has none."""


@dataclass(frozen=True)
class Result:
    """Of one plan."""

    refused: str = ""
    """By which rule; then nothing was run."""
    ranks: tuple[tuple[int, Seen], ...] = ()
    """One of each kind of rank."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What was seen that is not to be, each once."""
        found = [text for _, seen in self.ranks for text in _faults(seen)]
        return tuple(dict.fromkeys(found))

    @property
    def asks(self) -> str:
        """The operator of which the host must know what it finds, so that nothing can be run
        without values; "" if none."""
        lasts = [_last(seen) for _, seen in self.ranks if _asks(seen)]
        return lasts[0].split()[-1] if lasts else ""

    @property
    def sound(self) -> bool:
        """Whether it ran, and nothing was seen that is not to be."""
        return bool(self.ranks) and not self.faults and not self.asks


def _asks(seen: Seen) -> bool:
    return any(name in seen.failed for name in _ASKS)


def _last(seen: Seen) -> str:
    return seen.failed.strip().splitlines()[-1]


def _faults(seen: Seen) -> Iterator[str]:
    if seen.failed:
        if not _asks(seen):
            yield f"failed: {_last(seen)}"
        return
    for kind, texts in (("waits", seen.waits), ("race", seen.races), ("mixed", seen.mixed)):
        for text in texts:
            yield f"{kind}: {text}"
    if seen.looks > LOOKS:
        yield f"looks back {seen.looks} times, not {LOOKS}"


def run(asked: Sequence[Entry], folder: Path, limit_s: float) -> None:
    """Runs what is not there yet, and says on the way what is found."""
    left = [entry for entry in asked if not _file(folder, entry).exists()]
    print(f"{len(asked)} plans, {len(asked) - len(left)} there", file=sys.stderr)
    began = time.monotonic()
    for number in range(0, len(left), TOGETHER):
        _run_some(left[number : number + TOGETHER], folder, limit_s, began)


def _run_some(some: Sequence[Entry], folder: Path, limit_s: float, began: float) -> None:
    tasks: dict[str, Task] = {}
    named = {entry.name: entry for entry in some}
    for entry in some:
        try:
            plan, graph = entry.made()
        except PlanError as error:
            _keep(folder, entry, Result(refused=str(error)), began)
            continue
        for kind in rank_classes(plan, graph):
            tasks[f"{entry.name}#{kind.rank}"] = Task(plan, graph, kind.rank, STEPS)
    of_plan = groupby(each_seen(tasks, limit_s), lambda x: x[0].rpartition("#")[0])
    for name, ranks in of_plan:
        found = tuple((int(one.rpartition("#")[2]), seen) for one, seen in ranks)
        _keep(folder, named[name], Result(ranks=found), began)


def _keep(folder: Path, entry: Entry, result: Result, began: float) -> None:
    said = {"name": entry.name, **asdict(result)}
    _file(folder, entry).write_text(json.dumps(said))
    what = f"refused: {result.refused}" if result.refused else "; ".join(result.faults)
    what = what or (f"needs values: {result.asks}" if result.asks else "sound")
    passed = time.monotonic() - began
    print(f"{passed:6.0f} s {entry.name}: {what[:300]}", file=sys.stderr, flush=True)


def _file(folder: Path, entry: Entry) -> Path:
    return folder / f"{sha256(entry.name.encode()).hexdigest()[:16]}.json"


def kept(folder: Path, asked: Sequence[Entry]) -> Mapping[Entry, Result]:
    """What is there of the plans."""
    found = {}
    for entry in asked:
        if (path := _file(folder, entry)).exists():
            said = json.loads(path.read_text())
            ranks = tuple((rank, seen_of(seen)) for rank, seen in said["ranks"])
            found[entry.name] = entry, Result(said["refused"], ranks)
    return dict(found.values())
