"""The steps of a job that was started several times, as its starts logged them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.running.log_writers import JSONL


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step, as `meshwright run --json` prints it, and the start that took it."""

    start: int
    step: int
    """Counted from 0. One that was lost with its start is there again in a later one."""
    loss: float
    step_s: float


def start_folder(output: Path, number: int) -> Path:
    """The run directory of a start."""
    return output / f"start-{number}"


def steps_of_all(output: Path, starts: int, since: float) -> Iterator[StartedStep]:
    """All steps of so many starts, in their order; of a line that a death cut off nothing.

    `since`: the time when the first began. What a job left in the same folder before is not told.
    """
    for number in range(starts):
        path = start_folder(output, number) / JSONL
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if found["time"] < since:
                continue
            yield StartedStep(
                number, found["step"] - 1, found["loss_metrics/global_avg_loss"],
                found["time_metrics/end_to_end(s)"],
            )  # fmt: skip
