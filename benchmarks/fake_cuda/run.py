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
from meshwright.forms.sync import exchange_of
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.parameters import views_of
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
    on_host: bool = False
    """Whether the plan has an optimizer step on the host, which waits for gradients."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What was seen that is not to be, each once."""
        return tuple(dict.fromkeys(self._all_faults()))

    def _all_faults(self) -> Iterator[str]:
        for _, seen in self.ranks:
            yield from _faults(seen)
            if not self.on_host:
                yield from _waits(seen)

    @property
    def waits_as_said(self) -> bool:
        """Whether it waits, and nothing else was seen that is not to be."""
        waits = any(True for _, seen in self.ranks for _ in _waits(seen))
        return self.on_host and waits and not self.faults and not self.asks

    @property
    def asks(self) -> str:
        """The operator of which the host must know what it finds, so that nothing can be run
        without values; "" if none."""
        lasts = [_last(seen) for _, seen in self.ranks if _asks(seen)]
        return lasts[0].split()[-1] if lasts else ""

    @property
    def sound(self) -> bool:
        """Whether it ran, and nothing was seen that is not to be."""
        return bool(self.ranks) and not (self.faults or self.asks or self.waits_as_said)


def _asks(seen: Seen) -> bool:
    return any(name in seen.failed for name in _ASKS)


def _last(seen: Seen) -> str:
    return seen.failed.strip().splitlines()[-1]


def _faults(seen: Seen) -> Iterator[str]:
    if seen.failed:
        if not _asks(seen):
            yield f"failed: {_last(seen)}"
        return
    for kind, texts in (("race", seen.races), ("mixed", seen.mixed)):
        for text in texts:
            yield f"{kind}: {text}"


def _waits(seen: Seen) -> Iterator[str]:
    for text in seen.waits:
        yield f"waits: {text}"
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
    on_host = {}
    for entry in some:
        try:
            plan, graph = entry.made()
        except PlanError as error:
            _keep(folder, entry, Result(refused=str(error)), began)
            continue
        on_host[entry.name] = any(
            "optimizer" in exchange_of(view).on_host
            for stage in plan.stages for view in views_of(stage)
        )  # fmt: skip
        for kind in rank_classes(plan, graph):
            tasks[f"{entry.name}#{kind.rank}"] = Task(plan, graph, kind.rank, STEPS)
    of_plan = groupby(each_seen(tasks, limit_s), lambda x: x[0].rpartition("#")[0])
    for name, ranks in of_plan:
        found = tuple((int(one.rpartition("#")[2]), seen) for one, seen in ranks)
        _keep(folder, named[name], Result(ranks=found, on_host=on_host[name]), began)


def _keep(folder: Path, entry: Entry, result: Result, began: float) -> None:
    said = {"name": entry.name, **asdict(result)}
    _file(folder, entry).write_text(json.dumps(said))
    what = f"refused: {result.refused}" if result.refused else "; ".join(result.faults)
    what = what or ("waits, as its store says" if result.waits_as_said else "")
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
            found[entry.name] = entry, Result(said["refused"], ranks, said.get("on_host", False))
    return dict(found.values())
