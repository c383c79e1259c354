"""Tunes the size of a job's buckets while it trains, and cuts them anew.

Rank 0 holds the tuner, and tells all ranks once a trial what comes; all count the same steps, so
that other steps need no message. Between two trials the job runs with the best size so far until
what tuning has cost is a small share of what has been trained.
"""

import sys
import time
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from meshwright.forms.sync import chosen
from meshwright.ir.comm.by_store import of_all
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.measured import StepKind, TriedSize, TunedBuckets
from meshwright.runtime.check.run import on_first
from meshwright.runtime.record.record import StepRecord
from meshwright.runtime.step.tuning import STEPS, BucketTuner
from meshwright.runtime.step.updates import FormOptimizer

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job

SHARE = 0.05
"""Of the time of all steps so far, at most spent on tuning when a trial begins."""
MIB = 2**20


def regroup(job: "Job", bucket_bytes: int) -> None:
    """Cuts all buckets that can be to another size, between steps; every rank calls it."""
    job.settle()
    syncs = [stage.sync for stage in job.parts.stages.values()]
    for sync in syncs:
        if sync.bucket_sizes:
            sync.regroup(bucket_bytes)
    if isinstance(job.optimizer, FormOptimizer):
        job.optimizer.write_over(syncs)


class _Word(NamedTuple):
    """What rank 0 says when a trial is over."""

    now_bytes: int
    """From the next step on."""
    rest_steps: int
    """So many, until the next trial."""
    next_bytes: int
    over: bool


class Retuning:
    """One rank's part of the tuning of a job."""

    def __init__(self, job: "Job", steps: int = STEPS) -> None:
        """Every rank calls it; PlanError on all of them if there is nothing to tune."""
        self._job, self._steps = job, steps
        low, high, first = _bounds(job)
        self._tuner: BucketTuner | None = None
        on_first(lambda: self._make(low, high, first))
        self._bytes = self._next_bytes = first
        self._trial: list[float] = []
        self._rest = 0
        self._taken, self._elapsed_s, self._spent_s = 0, 0.0, 0.0
        self.over = low == high

    def _make(self, low: int, high: int, first: int) -> None:
        self._tuner = BucketTuner(low, high, first, steps=self._steps)

    @property
    def kind(self) -> StepKind:
        """Of the next step."""
        return "timed" if self.over or self._rest else "tuning"

    @property
    def tuned(self) -> TunedBuckets | None:
        """What has been tried so far; None on ranks that were only told."""
        if self._tuner is None:
            return None
        tried = [TriedSize(size_bytes=t.size_bytes, step_s=t.seconds) for t in self._tuner.tried]
        return TunedBuckets(
            tried=tuple(tried), chosen_bytes=self._bytes, over=self.over, steps=self._taken,
            elapsed_s=self._elapsed_s, spent_s=self._spent_s,
        )  # fmt: skip

    def took(self, record: StepRecord) -> None:
        """A step is over; every rank calls it, between steps."""
        if self.over or record.kind in ("tracked", "traced"):
            return
        self._taken += 1
        self._elapsed_s += record.step_s
        begun = time.perf_counter()
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._cut(self._next_bytes)
        else:
            self._trial.append(record.step_s)
            if len(self._trial) == self._steps:
                self._ended()
        took_s = time.perf_counter() - begun
        self._spent_s += took_s
        self._elapsed_s += took_s
        if self.over:
            self.say()

    def say(self) -> None:
        """On rank 0, what has been found."""
        if (tuned := self.tuned) is not None:
            print(f"meshwright: {said(tuned)}", file=sys.stderr, flush=True)

    def _ended(self) -> None:
        """A trial is over."""
        with self._job.failures.guard():
            word = on_first(self._choose)
        self._trial.clear()
        self._cut(word.now_bytes)
        self._rest, self._next_bytes, self.over = word.rest_steps, word.next_bytes, word.over

    def _choose(self) -> _Word:
        """Rank 0: what comes after the trial."""
        tuner, seconds, begun = self._tuner, self._trial, time.perf_counter()
        assert tuner is not None
        for one in seconds:
            tuner.took(one)
        usual_s = tuner.tried[0].seconds
        self._spent_s += max(0.0, sum(seconds[1:]) - usual_s * (len(seconds) - 1))
        if tuner.done:
            return _Word(tuner.size_bytes, 0, tuner.size_bytes, True)
        best = tuner.best_bytes
        spent_s = self._spent_s + time.perf_counter() - begun
        rest_s = spent_s / SHARE - self._elapsed_s
        if rest_s <= 0:
            return _Word(tuner.size_bytes, 0, tuner.size_bytes, False)
        return _Word(best, ceil(rest_s / usual_s), tuner.size_bytes, False)

    def _cut(self, bucket_bytes: int) -> None:
        if bucket_bytes != self._bytes:
            regroup(self._job, bucket_bytes)
            self._bytes = bucket_bytes


def _bounds(job: "Job") -> tuple[int, int, int]:
    """Bytes of the smallest and the largest buckets of all ranks, and of the plan's."""
    own = [stage.sync.bucket_sizes for stage in job.parts.stages.values()]
    sizes = [size for rank in of_all(own) for stage in rank for size in stage]
    if not sizes:
        forms = ", ".join(sorted({stage.sync_form for stage in job.plan.stages}))
        raise PlanError(
            f"tune=True: the plan's stages synchronise by {forms}, with buckets that cannot be cut "
            f"anew while a job runs; a plan can name a form (sync={' or sync='.join(chosen())}), "
            "or train without tune"
        )
    planned = sorted({size.now for size in sizes})
    if len(planned) > 1:
        raise PlanError(
            f"tune=True: stages of the plan have buckets of {planned} bytes, and all get the size "
            f"that is tried; give all of them {planned[0]}, or train without tune"
        )
    low, high = min(size.low for size in sizes), max(size.high for size in sizes)
    return low, high, min(max(planned[0], low), high)


def said(tuned: TunedBuckets) -> str:
    """What tuning has found, as a line."""
    if not tuned.over:
        return (
            f"tuning of buckets is not over: {len(tuned.tried)} trials in {tuned.steps} steps; "
            f"{tuned.chosen_bytes / MIB:.3g} MiB at the end"
        )
    if not tuned.tried:
        return "nothing to tune: there is one parameter, so one bucket"
    first, share = tuned.tried[0], tuned.spent_s / tuned.elapsed_s if tuned.elapsed_s else 0.0
    return (
        f"buckets of {tuned.chosen_bytes / MIB:.3g} MiB after {len(tuned.tried)} trials: "
        f"{tuned.gained:.1%} of a step saved beside the plan's {first.size_bytes / MIB:.3g} MiB "
        f"({1e3 * first.step_s:.4g} ms); {share:.1%} of {tuned.steps} steps was spent on it"
    )
