"""A run directory: the plan, and per rank what was measured and a profiler's trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile import measured
from meshwright.ir.profile.measured import Measured
from meshwright.runtime.record.record import Recorder

_OF_RANKS = ("measured_rank*.json", "trace_rank*.json.gz", "steps_rank*.jsonl")


def prepare(folder: Path, plan: Plan, rank: int) -> None:
    """Takes the folder for this plan; PlanError if it is of another one. Rank 0 writes the plan."""
    path, wanted = folder / "plan.json", plan_io.content_hash(plan)
    if path.exists() and (found := plan_io.content_hash(_held(path))) != wanted:
        raise PlanError(
            f"{folder} holds a run of plan {found[:12]}, this is plan {wanted[:12]}; choose "
            "another folder, or remove that one"
        )
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        # At once: other ranks may be reading it.
        written = folder / "plan.json.part"
        plan_io.save(plan, written)
        written.replace(path)


def begin(folder: Path, plan: Plan, rank: int) -> None:
    """As `prepare`; rank 0 also removes what an earlier run of the plan left.

    It does so before the ranks shake hands, and no rank writes before that. PlanError if such
    files are there without their plan: nobody can say whose they are.
    """
    if rank == 0 and (found := _of_ranks(folder)) and not (folder / "plan.json").exists():
        raise PlanError(
            f"{folder} holds {found[0].name} of a run whose plan.json is not there; choose another "
            "folder, or remove what is in it"
        )
    prepare(folder, plan, rank)
    for path in _of_ranks(folder) if rank == 0 else ():
        path.unlink()


def clear(folder: Path) -> None:
    """Removes a run directory of any plan; PlanError if it holds what no run leaves."""
    if not folder.exists():
        return
    ours = [*_of_ranks(folder), *(p for p in (folder / "plan.json",) if p.is_file())]
    if others := sorted(set(folder.iterdir()) - set(ours)):
        raise PlanError(f"{folder} holds {others[0].name}, which no run leaves: move it away")
    for path in ours:
        path.unlink()
    folder.rmdir()


def _of_ranks(folder: Path) -> list[Path]:
    return sorted(p for pattern in _OF_RANKS for p in folder.glob(pattern) if p.is_file())


def _held(path: Path) -> Plan:
    try:
        return plan_io.load(path, check_hash=False)
    except PlanError as error:
        raise PlanError(f"{error}; a run directory's plan.json must be a plan") from error


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"trace_rank{rank}.json.gz"


def steps_path(folder: Path, rank: int) -> Path:
    return folder / f"steps_rank{rank}.jsonl"


def write(found: Measured, folder: Path) -> Path:
    """Writes a rank's file; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"measured_rank{found.rank}.json"
    measured.save(found, path)
    return path


@contextmanager
def profiling(recorder: Recorder, device: torch.device, path: Path) -> Iterator[None]:
    """Writes a Chrome trace of what runs inside, with the names of our actions."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    recorder.naming = True
    try:
        with profile(activities=activities) as profiler:
            yield
    finally:
        recorder.naming = False
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
