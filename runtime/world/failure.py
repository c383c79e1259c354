"""A rank that fails, dies or hangs ends the whole job within seconds, and is named.

Every rank beats into the job's store and watches its neighbour. Whoever finds a failure writes it
to the store first come, first kept; all others read it, say so and leave.
"""

import atexit
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshwright.ir.comm.opening import STORE_OPERATION_S
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.torch_private import job_store
from meshwright.runtime.step.executor import RankProgress
from meshwright.runtime.world.launcher import launcher_store
from meshwright.runtime.world.patience import Patience
from meshwright.runtime.world.standing import (
    LEFT,
    RankStanding,
    dumps,
    first_cause,
    left,
    loads,
    standing,
)
from meshwright.runtime.world.stillness import Stillness

BEAT_S = 1.0
DEAD_S = 12.0
"""A rank that has not beaten while another one looked for so long, a look each beat, is dead.
Hanging Python code still beats."""
_PARTS = 10
"""Of the time between two beats: how often a rank that has taken no step looks whether it does."""
_BEAT_OPERATIONS, _SHARE = 4, 0.1
"""Of the store, of a rank that beats and looks at its neighbour; and of the store's time, at most,
for the beats of all ranks."""
_LOOKERS = 8
"""Ranks that look at all others, where something stands still: each reads as many beats as there
are ranks."""
GRACE_S = 2.0
"""The rank that failed leaves first, so that launchers name it and not its peers."""
_FAILED = "meshwright/failure"

FailureKind = Literal["raised", "died", "hung", "left", "gone"]
"""The last one: of a whole machine."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """What ends a job: which rank, how and in which step. The text says it to people."""

    kind: FailureKind
    rank: int
    step: int
    text: str
    error: str = ""
    """Type and text of what was raised."""

    def dumps(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes | str) -> Self:
        """What `dumps` wrote."""
        return cls(**json.loads(text))


def first_failure(store: Any) -> FirstFailure | None:
    """What was published in a job's store, if anything was."""
    return FirstFailure.loads(store.get(_FAILED)) if store.check([_FAILED]) else None


def publish(store: Any, found: FirstFailure) -> None:
    """Says what ends the job, for all to read; what was said first stays."""
    if store.add(_FAILED + "/count", 1) == 1:
        store.set(_FAILED, found.dumps())


def standings(store: Any, world_size: int) -> dict[int, RankStanding]:
    """Where ranks were at their last beats, of those that have beaten."""
    found = {rank: standing_of(store, rank) for rank in range(world_size)}
    return {rank: last for rank, last in found.items() if last is not None}


def standing_of(store: Any, rank: int) -> RankStanding | None:
    """Where a rank was at its last beat, if it has beaten."""
    key = _beat_key(rank)
    return loads(store.get(key)) if store.check([key]) else None


class Failures:
    """Watches this rank and its neighbour. Alone it tells a launcher where it is; without one it
    only names where an exception came from."""

    def __init__(self, rank: int, world_size: int, progress: RankProgress, hang_s: float) -> None:
        self._rank, self._world, self._progress = rank, world_size, progress
        self._patience, self._here = Patience(hang_s), Stillness()
        self._closed = threading.Event()
        self._ended_by = ""
        self._reported: BaseException | None = None
        self._told: FirstFailure | None = None
        # torchrun's; of other launchers, a shell that started the ranks may well be gone.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._thread: threading.Thread | None = None
        self._beat_s = beat_s(world_size)
        self._dead_s = max(DEAD_S, 4 * self._beat_s)
        self._looks = looks_at_all(rank, world_size)
        store = launcher_store() or (job_store() if world_size > 1 else None)
        if store is not None:
            self._store = store
            self._beat(0)
            self._thread = threading.Thread(target=self._watch, name="meshwright", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def guard(self) -> "_Reporter":
        """An exception inside is published with rank, step and action, then raised on."""
        return _Reporter(self)

    def asked_to_end(self, name: str) -> None:
        """The rank will leave by a signal of that name: what fails from now on is no failure."""
        self._ended_by = name

    def report(self, error: BaseException) -> None:
        """Publishes an exception of this rank as the job's failure, unless one came before; once,
        through however many guards it goes. What all ranks raise together ends nothing if they
        catch it: it is published when they leave by it."""
        if error is self._reported:
            return
        self._reported = error
        where = str(standing(self._progress))
        error.add_note(f"rank {self._rank}, {where}")
        self._told = self._raised(error, where)
        get_error_handler().record_exception(error)
        if isinstance(error, MeshwrightError) and error.everywhere:
            return
        if self._thread is not None and not self._closed.is_set() and not self._ended_by:
            found = self._told
            if _is_connection_error(error) and (behind := self._behind(error)):
                found = replace(behind, text=f"{behind.text} (seen by {found.text})")
            publish(self._store, found)
            error.add_note(f"first failure of the job: {self._first_failure(self._told.text)}")
        self._progress.phase = "failed"

    def _raised(self, error: BaseException, where: str) -> FirstFailure:
        said = f"{type(error).__name__}: {error}"
        text = f"rank {self._rank}, {where}: {said}"
        return FirstFailure("raised", self._rank, self._progress.step, text, said)

    def close(self) -> None:
        """The rank has nothing more to do with the others."""
        if self._thread is None or self._closed.is_set():
            return
        failed = getattr(sys, "last_exc", getattr(sys, "last_value", None))
        self._closed.set()
        self._thread.join(timeout=2 * BEAT_S)
        try:
            if failed is not None:
                known = failed is self._reported and self._told
                publish(self._store, known or self._raised(failed, "outside a step"))
            found = left(standing(self._progress), self._ended_by)
            self._store.set(_beat_key(self._rank), dumps(found, -1))
        except dist.DistError:
            pass  # the store left with another rank: nobody is there to tell
        atexit.unregister(self.close)

    def _beat(self, count: int) -> None:
        self._store.set(_beat_key(self._rank), dumps(standing(self._progress), count))

    def _first_failure(self, own: str) -> str:
        try:
            return FirstFailure.loads(self._store.get(_FAILED)).text
        except (dist.DistError, RuntimeError):
            return own  # the store went with the rank that failed

    def _watch(self) -> None:
        peer = (self._rank + 1) % self._world
        neighbour, count = Stillness(b""), 0
        while not self._rests():
            count += 1
            if self._launcher is not None and os.getppid() != self._launcher:
                self._leave(f"torchrun (process {self._launcher}) is gone")
            try:
                self._beat(count)
                if found := first_failure(self._store):
                    self._leave(found.text)
                self._here.look(self._progress.entered)
                if peer != self._rank and self._store.check([_beat_key(peer)]):
                    beat = self._store.get(_beat_key(peer))
                    if neighbour.look(beat) * self._beat_s >= self._dead_s:
                        self._judge_silent(peer, loads(beat))
                self._check_progress()
            except (dist.DistError, RuntimeError) as error:
                if self._progress.phase != "idle":
                    self._leave(f"the store of the job is gone ({error}); its rank died")
                return  # the others are done, and so is this rank

    def _rests(self) -> bool:
        """Until the next beat, or the first step: a rank that is killed soon after it has told of
        it. Whether it is closed."""
        if self._progress.entered:
            return self._closed.wait(self._beat_s)
        for _ in range(_PARTS):
            if self._closed.wait(self._beat_s / _PARTS):
                return True
            if self._progress.entered:
                break
        return False

    def _judge_silent(self, peer: int, last: RankStanding) -> None:
        """Publishes why the neighbour does not beat, if it should."""
        if last.phase != LEFT:
            step, at = self._place(last)
            text = f"rank {peer} died or was stopped, {at}: no sign of life for {self._dead_s:g} s"
            publish(self._store, FirstFailure("died", peer, step, text))
        elif self._stuck_s() > self._dead_s and standing(self._progress).waits:
            publish(self._store, _has_left(peer, last))

    def _place(self, last: RankStanding) -> tuple[int, str]:
        """Step and place of a rank that died: its last beat may be some steps old, and it was no
        further behind than this rank, which waits for it."""
        step = max(last.step, self._progress.step)
        return step, f"in step {step}" if step > last.step else str(last)

    def _stuck_s(self) -> float:
        """For how long this rank has been at one place of a step, by its looks."""
        inside = self._progress.phase in ("running", "receiving", "synchronising")
        return self._here.looks * self._beat_s if inside else 0.0

    def _check_progress(self) -> None:
        stuck_s, phase = self._stuck_s(), self._progress.phase
        limit_s = self._patience.limit_s(phase)
        if stuck_s <= limit_s:
            self._patience.saw(phase, self._progress.step, stuck_s)
        elif self._looks and (cause := self._slowest(limit_s)):
            publish(self._store, cause)

    def _slowest(self, limit_s: float) -> FirstFailure | None:
        """The rank that all wait for, where it is and for how long at least."""
        found = standings(self._store, self._world)
        if not found:
            return None
        first = first_cause(found)
        last = found[first]
        if last.phase == LEFT:
            return _has_left(first, last)
        phase = "" if last.outside else f" ({last.phase})"
        place = f", in {last.place}" * bool(last.place)
        text = f"rank {first}, {last}{phase}: no progress for {limit_s:g} s{place}"
        return FirstFailure("hung", first, last.step, text)

    def _behind(self, error: BaseException) -> FirstFailure | None:
        """Which other rank a broken or late connection comes from, as far as beats say; in about
        three of them."""
        try:
            if not self._looks:  # others say it
                time.sleep(4 * self._beat_s)
                return None
            keys = {rank: _beat_key(rank) for rank in range(self._world) if rank != self._rank}
            known = {r: self._store.get(k) for r, k in keys.items() if self._store.check([k])}
            time.sleep(3 * self._beat_s)
            for rank, beat in known.items():
                if (last := loads(beat)).phase != LEFT and self._store.get(keys[rank]) == beat:
                    step, at = self._place(last)
                    return FirstFailure("died", rank, step, f"rank {rank} died, {at}")
            for rank, found in standings(self._store, self._world).items():
                if found.phase == LEFT and rank != self._rank:
                    return _has_left(rank, found)
            late = "timed out" in str(error).lower()
            return self._slowest(self._patience.most_s) if late else None
        except (dist.DistError, RuntimeError):
            return None  # the store has gone too

    def _leave(self, text: str) -> None:
        """Ends this process: its main thread may be stuck in a collective for good."""
        own = text.startswith(f"rank {self._rank},")  # it leaves last, unless it can by itself
        time.sleep(5 * GRACE_S if own else GRACE_S)
        if not self._closed.is_set() and not self._ended_by:
            print(f"meshwright: rank {self._rank} stops: {text}", file=sys.stderr, flush=True)
            os._exit(1)


class _Reporter:
    """Reports what goes through it, whatever it is, and lets it through."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self._failures.report(error)


def beat_s(world_size: int) -> float:
    """Seconds between two beats of a rank: more where so many ranks would keep the store busy."""
    return max(BEAT_S, world_size * _BEAT_OPERATIONS * STORE_OPERATION_S / _SHARE)


def looks_at_all(rank: int, world_size: int) -> bool:
    """Whether the rank is one of those that look at all others where something stands still."""
    return rank % max(1, world_size // _LOOKERS) == 0


def _beat_key(rank: int) -> str:
    return f"meshwright/beat/{rank}"


def _has_left(rank: int, last: RankStanding) -> FirstFailure:
    text = f"rank {rank} left the job, {last}, while others need it"
    return FirstFailure("left", rank, last.step, text)


def _is_connection_error(error: BaseException) -> bool:
    words = ("Connection", "gloo", "NCCL", "closed by peer", "Broken pipe", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
