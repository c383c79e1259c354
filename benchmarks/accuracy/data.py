"""What is predicted and what is measured of one plan, as JSON files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("forward", "backward", "collectives", "wait", "optimizer", "rest")
"""Where the seconds of a step go, on the rank that waits least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the cost model says of a plan before it has ever run."""

    model: str
    plan: str
    ranks: int
    hash: str
    step_s: float
    error_band: float
    source: str
    seconds: Mapping[str, float]
    """By KINDS."""
    base_bytes: int
    """Resident in a process before it makes the job: from the profile."""
    tensor_bytes: int
    """Peak of the worst rank."""
    resident_bytes: int
    """Peak of the worst rank, `base_bytes` included."""
    made_at: str

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a plan."""

    model: str
    plan: str
    ranks: int
    hash: str
    turn: int
    """Which run of this plan."""
    started_at: str
    pace: float
    """Time that fixed work took between the steps, relative to what it took before the runs: what
    others on the host did to it. It is taken off all seconds but `cpu_s`. Different processes take
    up to 20 % more or less for such work: only runs of one model are comparable."""
    steps_s: tuple[tuple[float, ...], ...]
    """Per rank, the timed steps."""
    step_s: float
    """Largest median of a rank."""
    seconds: Mapping[str, float]
    """By KINDS, of a median step: collectives only where the rank does nothing else."""
    cpu_s: float
    """Processor seconds of a step, summed over ranks."""
    base_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    """Per rank, the peak since the job was made (VmHWM): all pages of the process that are in
    memory, those that it shares with its parent included."""
    tensor_bytes: tuple[int, ...]
    """Per rank, the peak of live tensors in a step of its own."""

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.plan


def write(path: Path, found: "Predicted | Measured") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1) + "\n")


def read_predicted(folder: Path) -> list[Predicted]:
    """By name of file."""
    return [Predicted(**json.loads(p.read_text())) for p in sorted(folder.glob("*.json"))]


def read_measured(folder: Path) -> list[Measured]:
    """By name of file."""
    return [_measured(json.loads(p.read_text())) for p in sorted(folder.glob("*.json"))]


def _measured(data: dict[str, object]) -> Measured:
    steps = data.pop("steps_s")
    assert isinstance(steps, list)
    lists = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
    return Measured(**{**data, **lists}, steps_s=tuple(map(tuple, steps)))  # type: ignore[arg-type]


def file_name(model: str, plan: str) -> str:
    return f"{model}--{plan.replace(' ', '-')}"
