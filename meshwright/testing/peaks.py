"""The most bytes of live tensors that a job has in a step."""

from typing import Any

from meshwright.runtime.job.job import Job


def peak_of(job: Job, batch: Any, steps: int = 2) -> int:
    """Returns that of a step after `steps` others on this rank, and closes the job; all ranks call
    it."""
    for _ in range(steps):
        job.step(batch)
    job.track_memory(batch)
    assert job.tensor_memory is not None
    job.close()
    return job.tensor_memory.peak_bytes
