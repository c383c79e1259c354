"""When a job saves, and how it goes on: one object for every loop.

    with mw.Saver(job, "checkpoints", every="10m", keep=2) as saver:
        for batch in saver.batches(loader):
            job.step(batch)
            saver.stepped()

It goes on from the newest checkpoint of the folder, gives the batches that are left, writes
checkpoints beside training, and when the process is asked to end (SIGTERM, or SIGUSR1 ahead of a
time limit) all ranks finish one step, save and leave with the exit code `exit_codes.RETRY`.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from meshwright.ir.comm.by_store import Aside, from_first, meet
from meshwright.ir.errors import NonFinite, PlanError
from meshwright.ir.text.plain_text import shown
from meshwright.ir.torch_private import RESTARTS
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.background import BackgroundWriter
from meshwright.runtime.checkpoint.checkpoint import Snapshot, check_keep, write_whole
from meshwright.runtime.checkpoint.node_memory import given_memory
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.memory_saves import MemorySaves
from meshwright.runtime.job.save_interval import SaveInterval as SaveInterval
from meshwright.runtime.job.save_interval import chosen_interval_s
from meshwright.runtime.world.agreement import Agreement
from meshwright.runtime.world.children import GRACE_S
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.runtime.world.leaving import LEAVE, LeaveRequest, leaving

LEAVE_S = GRACE_S - 5.0
"""From SIGTERM until a rank that still saves leaves all the same: a batch system kills it soon."""
_SIGNAL_S = 2.0
_SAVE, _LEAVE, _REMEMBER = "save", "leave", "remember"


class Saver:
    """Decides when a job saves and leaves; every rank calls the same methods in the same order."""

    def __init__(
        self,
        job: Job,
        folder: str | Path | None,
        *,
        every: str | int | None = None,
        keep: int = 1,
        scheduler: Any = None,
        resume: bool | None = None,
        save: Callable[[], object] | None = None,
        at_last: Callable[[], None] = lambda: None,
    ) -> None:
        """Goes on from the newest checkpoint in `folder`, if there is one. `resume=False` refuses a
        folder that has one; so does None, unless a launcher has started the job again.

        `every` is a `SaveInterval`'s text, `auto` to save as often as costs least; without it a
        checkpoint is written at the end and when the job is asked to leave. `save` takes the place
        of writing into `folder`, for loops that keep checkpoints of their own. `at_last` runs if
        the process has to leave within a step.
        """
        self.job, self._scheduler = job, scheduler
        self._every = SaveInterval() if every is None else SaveInterval.parse(every)
        if self._every.chosen and (save is not None or folder is None):
            raise PlanError(
                f"every={every!r} needs a folder of checkpoints that this job writes itself, to "
                "see what that takes; nearest is a time, such as 10m"
            )
        world = job.plan.world_size
        lag = 0 if job.replica is None else job.replica.lag
        self._agreement = Agreement(world, late=job.records.late, lag=lag)
        self._save, self._at_last = save, at_last
        self._writer: BackgroundWriter | None = None
        self._places: deque[tuple[int, Any]] = deque()
        self.resumed = False
        """Whether a checkpoint was loaded."""
        self._folder = None if folder is None else Path(folder)
        self._bad_step = -1
        if folder is not None:
            check_keep(keep)
            whole = partial(_write_whole, Path(folder), job.parts.rank, keep)
            self._writer = BackgroundWriter(world, folder, whole)
        memory = None if folder is None else given_memory()
        self._memory = None if memory is None else MemorySaves(job, memory)
        self._saved = job.state.step
        """The newest step in the folder."""
        if folder is not None:
            self.resumed = self._go_on(Path(folder), resume)
        self._since = time.monotonic()
        self._held_s = 0.0
        """What the newest save held up training."""
        self._asked: LeaveRequest | None = None
        self._told = self._given_up = False
        self._stack = ExitStack()
        self.left = False
        """Whether all ranks have saved to leave: the loop is to take no further step."""

    @property
    def saves(self) -> bool:
        """Whether anything is saved, by this object or the loop it is in."""
        return self._writer is not None or self._save is not None

    @property
    def asked_by(self) -> signal.Signals | None:
        """The signal that asked this rank, or another one, to end; SIGTERM of others'."""
        own = None if self._asked is None else self._asked.by
        return own or (signal.SIGTERM if self.left else None)

    def asked_before(self, error: BaseException) -> bool:
        """Whether this rank was asked to end before something failed. A launcher that is killed
        takes the job's store along, and a moment later its ranks get the signal."""
        until = time.monotonic() + _SIGNAL_S * isinstance(error, dist.DistError)
        while self.asked_by is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.asked_by is not None

    def _go_on(self, folder: Path, resume: bool | None) -> bool:
        """Loads the newest state, of the disk or, if the job is started again, of memory."""
        again = started_again()
        known = from_first(_newest_step(folder))
        newer = self._memory.newer_than(known) if self._memory is not None and again else None
        if known < 0 and newer is None:
            return False
        if not (again if resume is None else resume):
            raise PlanError(
                f"{folder} holds a checkpoint: go on from it with resume=True (--resume), or save "
                "to another folder"
            )
        self.job.load(folder, self._scheduler, newer=newer)
        self._saved = known if newer is not None else self.job.state.step
        return True

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yields what the job has not trained on of `source`, its global batches in their order,
        until it is asked to leave.

        A source with `state_dict` and `load_state_dict` is put where it was; of any other, the
        batches that are done are read and dropped. PlanError if they do not end where one of this
        plan's does.
        """
        state = self.job.state
        places: Any = source if hasattr(source, "load_state_dict") else None
        if put := places is not None and state.data is not None:
            places.load_state_dict(state.data)
        reader, given, size = iter(source), state.samples, self.job.plan.global_batch_size
        if given % size and not put:
            raise PlanError(
                f"the checkpoint is of {given} samples, no multiple of the plan's global batch of "
                f"{size}: train on with a batch that divides {given}, or pass a loader that has "
                "state_dict and load_state_dict"
            )
        for _ in range(0 if put else given // size):
            next(reader, None)
        for batch in reader:
            given += size
            if places is not None:
                self._places.append((given, places.state_dict()))
            yield batch
            if self.left:
                return

    def stepped(self) -> bool:
        """After each step, and after the schedule's: saves if it is time. True: leave now."""
        job, step = self.job, self.job.state.step
        self._note_place()
        self._check()
        if self._asked is not None and self._asked.by is not None:
            self._told = self._told or self._agreement.ask(step, _LEAVE)
        elif self._is_late():
            self._agreement.ask(step, _SAVE)
        elif self._memory is not None and job.parts.rank == 0 and self._memory.is_due():
            self._agreement.ask(step, _REMEMBER)
        due = self._agreement.due(step)
        self.left = due == _LEAVE
        if due in (_SAVE, _LEAVE) or (self._every.steps and step % self._every.steps == 0):
            self.save()
        elif due == _REMEMBER and self._memory is not None:
            self._memory.save(self._scheduler)
        if due in (_SAVE, _LEAVE) and job.parts.rank == 0:
            self._since = time.monotonic()
        return self.left

    def _note_place(self) -> None:
        """Where the source stood when it had given what the job has read."""
        state = self.job.state
        while self._places and self._places[0][0] <= state.samples:
            state.data = self._places.popleft()[1]

    def _is_late(self) -> bool:
        """Whether rank 0's clock says that it is time."""
        seconds = self._every.seconds
        if self._every.chosen and self._writer is not None and self._writer.took_s is not None:
            seconds = chosen_interval_s(self._held_s, self._writer.took_s, self.job.plan.world_size)
        if not seconds or self.job.parts.rank != 0:
            return False
        return time.monotonic() - self._since > seconds

    def save(self) -> None:
        """Copies the job's state to the host and begins to write it; every rank calls it."""
        job = self.job
        if self._save is not None:
            self._save()
        elif self._writer is not None:
            began = time.monotonic()
            with job.failures.guard():
                self._writer.wait()  # before the copy: the host has room for one
            self._writer.start(job.snapshot(self._scheduler))
            self._held_s = time.monotonic() - began
        self._saved = job.state.step

    def _check(self) -> None:
        if self._writer is not None:
            with self.job.failures.guard():
                self._writer.check()

    def go_back(self, error: NonFinite) -> None:
        """Of a job with `on_nonfinite="back"`, when a step raised: takes the newest checkpoint, and
        goes on from the batch after this one. Raises the error again where there is no checkpoint,
        or where that did not help: the furthest step is no further than the last time. Every rank
        calls it."""
        job = self.job
        if self._folder is None or self._writer is None:
            raise error
        self._writer.wait()
        known = from_first(os.path.lexists(self._folder / folders.LATEST))
        if not known or job.state.step <= self._bad_step:
            raise error
        self._note_place()
        self._bad_step, samples, data = job.state.step, job.state.samples, job.state.data
        job.load(self._folder, self._scheduler)
        if job.parts.rank == 0:
            text = f"meshwright: {error}. Going back to step {job.state.step}, without that batch"
            print(text, file=sys.stderr, flush=True)
        job.state.samples, job.state.data = samples, data

    def give_up(self) -> None:
        """Nothing more is saved: ranks have gone in the middle of a step."""
        self._given_up = True

    def finish(self) -> None:
        """Saves the last step, and waits until all that was saved is written; every rank calls it
        when it takes no more steps."""
        if self._memory is not None and not self._given_up:
            self._memory.finish()
        if self._writer is not None and not self._given_up:
            if self._saved != self.job.state.step:
                self.save()
            with self.job.failures.guard():
                self._writer.wait()
                meet()

    def __enter__(self) -> Self:
        """From here on a signal to end is answered after a step."""
        tell = self.job.failures.asked_to_end
        self._asked = self._stack.enter_context(
            leaving(tell, self._at_last, _leave_s() if self.saves else None)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finishes. SystemExit if the job leaves since it was asked to: with `RETRY`, or where it
        saves nothing with 128 + the signal's number."""
        with self._stack:
            if error is None:
                self.finish()
        if error is None and self.left:
            assert self.asked_by is not None
            self.job.close()
            raise SystemExit(RETRY if self.saves else 128 + self.asked_by)


def _write_whole(folder: Path, rank: int, keep: int, found: Snapshot, aside: Aside | None) -> None:
    write_whole(found, folder, rank, keep, alone=aside is None, aside=aside)


def _newest_step(folder: Path) -> int:
    """The step that `latest` names, -1 without one; what it names may be missing or damaged."""
    if not os.path.lexists(folder / folders.LATEST):
        return -1
    try:
        return folders.step_of(folder / folders.named(folder))
    except PlanError:
        return 0  # a load says what is wrong with it


def started_again() -> bool:
    """Whether a launcher, such as torchrun with --max-restarts, has started this job before."""
    return int(os.environ.get(RESTARTS, "0") or 0) > 0


def _leave_s() -> float:
    text = os.environ.get(LEAVE, "")
    try:
        found = float(text or LEAVE_S)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise PlanError(f"{LEAVE}={shown(text)} is not a number of seconds, such as {LEAVE_S:g}")
    return found
