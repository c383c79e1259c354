"""What a job sends, counted message by message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(job: Any, *purposes: str) -> Iterator[list[list[int]]]:
    """Counts what this rank waits for later, of some purposes (all, if none is named): bytes of
    each message as if replicated, by step."""
    steps: list[list[int]] = []
    pending, step = job.recorder.pending, job.step

    def noted(what: Any, work: Any, start: Any) -> Any:
        steps[-1].extend([what.nbytes] * (not purposes or what.purpose in purposes))
        return pending(what, work, start)

    def stepped(*args: Any, **more: Any) -> Any:
        steps.append([])
        return step(*args, **more)

    job.recorder.pending, job.step = noted, stepped
    try:
        yield steps
    finally:
        job.recorder.pending, job.step = pending, step
