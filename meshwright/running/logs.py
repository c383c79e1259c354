"""The metrics of a run, to as many places as wanted. Rank 0 writes, the others do not."""

import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.ir.errors import PlanError
from meshwright.running.log_writers import WRITERS, Writer
from meshwright.running.metrics import MetricNames, StepFigures
from meshwright.runtime.job.job import Job


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds that `jsonl,tensorboard` names; PlanError with the nearest that exists."""
    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    for kind in kinds:
        if kind not in WRITERS:
            near = difflib.get_close_matches(kind, WRITERS, 1, 0.0)[0]
            raise PlanError(f"no log {kind!r}; nearest is {near!r} of {', '.join(WRITERS)}")
    return kinds


class MetricLog:
    """The metrics of a job's steps, in any loop:

    with MetricLog(job, "runs/first", "jsonl,tensorboard") as log:
        for batch in loader:
            log.step(job.step(batch))
    """

    def __init__(self, job: Job, folder: str | Path, kinds: str | Sequence[str] = "jsonl") -> None:
        wanted = parse_kinds(kinds) if isinstance(kinds, str) else parse_kinds(",".join(kinds))
        self._job = job
        self._names = MetricNames(job.plan, job.graph, job.device)
        self._writers: list[Writer] = []
        self._last = time.perf_counter()
        if job.parts.rank == 0 and wanted:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writers = [WRITERS[kind](Path(folder)) for kind in wanted]

    def step(self, loss: Any, *, step_s: float | None = None, data_s: float = 0.0) -> None:
        """A step is over; its seconds are those since the last one unless they are given."""
        now = time.perf_counter()
        taken, self._last = now - self._last, now
        if not self._writers:
            return
        norm = self._job.grad_norm
        figures = StepFigures(
            loss=float(loss), step_s=taken if step_s is None else step_s, data_s=data_s,
            learning_rate=float(self._job.optimizer.param_groups[0]["lr"]),
            grad_norm=None if norm is None else float(norm),
        )  # fmt: skip
        metrics = self._names.of(figures, self._job.state.samples)
        for writer in self._writers:
            writer.write(self._job.state.step, metrics)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
