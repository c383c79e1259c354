"""A rank that fails, dies or hangs ends the whole job within seconds, and is named.

Every rank beats into the job's store and watches its neighbour. Whoever finds a failure writes it
to the store first come, first kept; all others read it, say so and leave.
"""

import atexit
import os
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshwright.ir.torch_private import job_store
from meshwright.runtime.executor import Progress

BEAT_S = 1.0
DEAD_S = 12.0
"""A rank that has not beaten for so long is dead. Hanging Python code still beats."""
GRACE_S = 2.0
"""The rank that failed leaves first, so that launchers name it and not its peers."""
_FAILED = "meshwright/failure"


class Failures:
    """Watches this rank and its neighbour; alone, it only names where an exception came from."""

    def __init__(self, rank: int, world_size: int, progress: Progress, hang_s: float) -> None:
        self._rank, self._world, self._progress, self._hang_s = rank, world_size, progress, hang_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._store = job_store()
            self._store.set(_beat_key(rank), f"0 {self._standing()}")
            self._thread = threading.Thread(target=self._watch, name="meshwright", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def guard(self) -> "_Reporter":
        """An exception inside is published with rank, step and action, then raised on."""
        return _Reporter(self)

    def report(self, error: BaseException) -> None:
        """Publishes an exception of this rank as the job's failure, unless one came before."""
        where = f"step {self._progress.step}, action {self._progress.action}"
        error.add_note(f"rank {self._rank}, {where}")
        if self._thread is not None and not self._closed.is_set():
            dead = self._dead_peers() if _is_connection_error(error) else []
            text = f"rank {self._rank}, {where}: {type(error).__name__}: {error}"
            if dead:
                text = f"rank {dead[0]} died (seen by {text})"
            self._publish(text)
            error.add_note(f"first failure of the job: {self._first_failure(text)}")
        get_error_handler().record_exception(error)
        self._progress.phase = "failed"

    def close(self) -> None:
        """The rank has nothing more to do with the others."""
        if self._thread is None or self._closed.is_set():
            return
        failed = getattr(sys, "last_exc", getattr(sys, "last_value", None))
        self._closed.set()
        self._thread.join(timeout=2 * BEAT_S)
        try:
            if failed is not None:
                self._publish(f"rank {self._rank}, outside a step: {failed!r}")
            self._store.set(_beat_key(self._rank), "done")
        except dist.DistError:
            pass  # the store left with another rank: nobody is there to tell
        atexit.unregister(self.close)

    def _publish(self, text: str) -> None:
        if self._store.add(_FAILED + "/count", 1) == 1:
            self._store.set(_FAILED, text)

    def _first_failure(self, own: str) -> str:
        try:
            return str(self._store.get(_FAILED).decode())
        except (dist.DistError, RuntimeError):
            return own  # the store went with the rank that failed

    def _watch(self) -> None:
        peer = (self._rank + 1) % self._world
        seen, since, count = b"", time.monotonic(), 0
        while not self._closed.wait(BEAT_S):
            count += 1
            try:
                self._store.set(_beat_key(self._rank), f"{count} {self._standing()}")
                if self._store.check([_FAILED]):
                    self._leave(self._store.get(_FAILED).decode())
                if self._store.check([_beat_key(peer)]):
                    beat = self._store.get(_beat_key(peer))
                    if beat != seen:
                        seen, since = beat, time.monotonic()
            except (dist.DistError, RuntimeError) as error:
                if self._progress.phase != "idle":
                    self._leave(f"the store of the job is gone ({error}); its rank died")
                return  # the others are done, and so is this rank
            if seen != b"done" and time.monotonic() - since > DEAD_S:
                self._publish(f"rank {peer} died: no sign of life for {DEAD_S:g} s")
            self._check_progress()

    def _check_progress(self) -> None:
        progress = self._progress
        stuck_s = time.monotonic() - progress.since
        if progress.phase in ("running", "receiving", "synchronising") and stuck_s > self._hang_s:
            standings = [self._peer_standing(rank) for rank in range(self._world)]
            # Who is furthest behind and not waiting for others is the first cause.
            first = min(range(self._world), key=lambda rank: _lateness(standings[rank]))
            step, _, phase, action = standings[first]
            self._publish(
                f"rank {first}, step {step}, action {action} ({phase}): no progress for "
                f"{self._hang_s:g} s"
            )

    def _standing(self) -> str:
        p = self._progress
        return f"{p.step} {int(p.phase not in ('idle', 'running'))} {p.phase} {p.action}"

    def _peer_standing(self, rank: int) -> tuple[int, int, str, str]:
        if not self._store.check([_beat_key(rank)]):
            return 0, 0, "idle", "start"
        words = self._store.get(_beat_key(rank)).decode().split(" ", 4)
        if len(words) < 5:
            return sys.maxsize, 1, "done", "end"
        return int(words[1]), int(words[2]), words[3], words[4]

    def _dead_peers(self) -> list[int]:
        """Ranks that do not beat any more, in about three beats."""
        keys = {rank: _beat_key(rank) for rank in range(self._world) if rank != self._rank}
        try:
            known = {r: self._store.get(k) for r, k in keys.items() if self._store.check([k])}
            time.sleep(3 * BEAT_S)
            return [r for r, beat in known.items() if self._store.get(keys[r]) == beat != b"done"]
        except (dist.DistError, RuntimeError):
            return []  # the store has gone too

    def _leave(self, text: str) -> None:
        """Ends this process: its main thread may be stuck in a collective for good."""
        own = text.startswith(f"rank {self._rank},")
        time.sleep(5 * GRACE_S if own else GRACE_S)
        if not self._closed.is_set():
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


def _beat_key(rank: int) -> str:
    return f"meshwright/beat/{rank}"


def _lateness(standing: tuple[int, int, str, str]) -> tuple[int, int]:
    return standing[:2]


def _is_connection_error(error: BaseException) -> bool:
    words = ("Connection", "gloo", "NCCL", "closed by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
