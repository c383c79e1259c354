"""What a run leaves: one JSON file, written anew after each step."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu.step import ERROR, Value
from meshwright.ir.errors import PlanError

SCHEMA = "meshwright.gpu-run/1"
FILE = "results.json"
LOG = "log.txt"
PROFILE = "profile.db"
PACKAGES = "packages.txt"
"""Of the machine: `name==version` a line."""
MODULES = "modules.txt"
"""Of a rehearsal: the names of all that was imported."""
LEFT = (FILE, LOG, PROFILE, PACKAGES, MODULES)
"""All that a run leaves."""
Status = Literal["done", "failed", "out of time", "out of memory", "died", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step ended, and the facts that it had found by then."""

    step: str
    status: Status
    why: str = ""
    """What went wrong; empty for steps that are done."""
    seconds: float = 0.0
    limit_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of a step that ended by itself, and of what it waited for."""
    facts: dict[str, Value] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, Value]:
        """Rows that failed, and why."""
        failed = f"/{ERROR}"
        return {k.removesuffix(failed): v for k, v in self.facts.items() if k.endswith(failed)}

    @property
    def sound(self) -> bool:
        """Whether the step and all its rows are done."""
        return self.status == "done" and not self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRun:
    """A whole run."""

    begun: str
    """Date and time, UTC, as ISO 8601."""
    device: str
    rehearsal: bool
    budget_s: float
    results: tuple[Result, ...] = ()

    def facts(self, step: str) -> dict[str, Value]:
        """Those of a step; none if it did not run."""
        return next((r.facts for r in self.results if r.step == step), {})


def save(run: DayRun, folder: Path) -> None:
    """Writes the run; a reader sees the old file or the new one, never half of one."""
    part = folder / f"{FILE}.part"
    text = json.dumps({"schema": SCHEMA, **asdict(run)}, indent=1, allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, folder / FILE)


def load(folder: Path) -> DayRun:
    """The run in a folder; PlanError if there is none or it is of another schema."""
    path = folder / FILE
    if not path.is_file():
        raise PlanError(f"{folder} has no {FILE}: give the --out of a run of benchmarks.gpu")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema", None) != SCHEMA:
            raise PlanError(f"{path} is not of schema {SCHEMA}: make the run again")
        results = tuple(Result(**one) for one in data.pop("results"))
        return DayRun(**data, results=results)
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"{path} is damaged ({error}): make the run again") from error
