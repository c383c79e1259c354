"""Ranks that this process starts on its machine, all of a job or some, follows and ends."""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGABRT, SIGKILL, SIGUSR1, Signals
from types import TracebackType
from typing import Self

from torch._C._distributed_c10d import Store, TCPStore

from meshwright.running.spares import USUAL, Spares
from meshwright.runtime.world import children, launcher
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.runtime.world.failure import (
    BEAT_S,
    FirstFailure,
    first_failure,
    publish,
    standing_of,
    standings,
)
from meshwright.runtime.world.standing import RankStanding

_MESHWRIGHT = ("-m", "meshwright")
_POLL_S = 0.05
_LOOK_S = 0.25
"""From one look into the store to the next."""
_CAUSE_S = 3 * BEAT_S
"""What a rank that has failed may take to say why, and the others to say where they were."""
_LAST_WORDS_S = 1.0
"""From the cause until what is left is killed: the rank that failed writes a traceback."""


@dataclass(frozen=True)
class JobEnd:
    """How the ranks of a job ended."""

    codes: Mapping[int, int]
    """Exit codes by rank, -n of one that signal n ended."""
    cause: FirstFailure | None = None
    detected_s: float = 0.0
    """From the failure, as far as this process could see it, until the cause was known."""
    asked_by: int = 0
    """The signal that asked this process to end, if one did."""
    lost: tuple[int, ...] = ()
    """Ranks that died, were stopped or hang: what they ran on may be gone."""

    @property
    def saved(self) -> bool:
        """Whether ranks left as they were asked to, with all they have done saved."""
        return self.cause is None and RETRY in self.codes.values()

    @property
    def exit_code(self) -> int:
        """Of the job: 0, or that of a failure, as shells count."""
        if self.saved:
            return RETRY
        if self.asked_by:
            return 128 + self.asked_by
        first = [self.codes[self.cause.rank]] if self.cause and self.codes else []
        wrong = [code for code in (*first, *self.codes.values()) if code]
        code = next(iter([*(c for c in wrong if c != -SIGKILL), *wrong]), 0)
        if code < 0 and self.cause is not None and self.cause.kind == "raised":
            return 1  # it was killed, or Gloo aborted it, before it could leave with a code
        return code if code >= 0 else 128 - code


@dataclass(eq=False)
class Ranks:
    """Processes of one job. Inside `with`; at the end of the block none is left."""

    world_size: int
    arguments: Sequence[str]
    """Of `python`."""
    store: TCPStore
    started: int = 0
    """How often the job was started before."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """More of their environment."""
    received: list[int] | None = None
    """Signals that this process has noted and notes; None: it does so from now on."""
    stdout: int | None = None
    """Where their stdout goes; None: where this process's goes."""
    grace_s: float = children.GRACE_S
    """From a signal to this process until ranks that go on are killed."""
    own: Sequence[int] | None = None
    """The ranks that are started here; None: all of them."""
    node: int = 0
    """Number of this machine."""
    spares: Spares | None = None
    """Processes that may become ranks, if what these run is `meshwright`; once they train there are
    to be as many as its count."""
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ours: set[int] = field(default_factory=set)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        self._ours = children.children_now()
        noted = self.received
        self._received = (
            self._stack.enter_context(children.ending_signals()) if noted is None else noted
        )
        self._stack.enter_context(children.orphans_come_here())
        for rank in self._here:
            own = launcher.environment(
                self.store, rank, self.world_size, self.started, own=self._here, node=self.node
            )
            self._processes[rank] = self._process({**own, **self.extra})
        return self

    def _process(self, own: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if self.spares is not None and self.arguments[:2] == _MESHWRIGHT:
            found = self.spares.become(own, self.arguments[2:])
            if found is not None:
                return found
        return subprocess.Popen(
            [sys.executable, *self.arguments], start_new_session=True, stdout=self.stdout,
            env={**USUAL, **os.environ, **own}, preexec_fn=children.dying_with_parent(),
        )  # fmt: skip

    @property
    def _here(self) -> Sequence[int]:
        return range(self.world_size) if self.own is None else self.own

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._kill()
        for process in self._processes.values():
            process.wait()
        if sys.platform == "linux":
            children.end_orphans(self._ours | (self.spares.pids if self.spares else set()))
        self._stack.close()

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to some ranks, or to all, and to what they have started."""
        for rank in self._here if ranks is None else ranks:
            if self._processes[rank].poll() is None:
                children.signal_group(self._processes[rank].pid, number)

    def _kill(self) -> None:
        for process in self._processes.values():  # also what a rank left in its session
            children.signal_group(process.pid, SIGKILL)

    def poll(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        found = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in found.items() if code is not None}

    def standings(self) -> dict[int, RankStanding]:
        """Where all ranks of the job are, also those of other machines."""
        return standings(launcher.told(self.store, self.started), self.world_size)

    def wait(self, leave: Callable[[], bool] = lambda: False) -> JobEnd:
        """Returns when all ranks have ended: by themselves, or killed after one of them failed.

        Signals that this process gets are sent on to them. Once they train, and `leave` says so,
        they are asked to save and leave.
        """
        sent = 0
        deadline = math.inf
        looked, left = 0.0, False
        while len(codes := self.poll()) < len(self._here):
            now = time.monotonic()
            for number in self._received[sent:]:
                self.send(number)
                if number not in children.warning_signals():
                    deadline = min(deadline, now + self.grace_s)
            sent = len(self._received)
            failed = {r: c for r, c in codes.items() if c not in (0, RETRY)}
            if now > deadline:
                self._kill()
            if failed or now - looked > _LOOK_S:
                looked = now
                if not sent and (cause := self._cause(failed)):
                    return self._end_all(cause, now)
                self._refill()
                wanted = leave()  # also where they were asked: it may raise
                if wanted and not left and self._train():
                    self.send(SIGUSR1)
                    left = True
            time.sleep(_POLL_S)
        failed = {r: c for r, c in codes.items() if c not in (0, RETRY)}
        asked_by = next((n for n in self._received if n not in children.warning_signals()), 0)
        if self._received or not failed:
            return JobEnd(codes, None, asked_by=asked_by or next(iter(self._received), 0))
        cause = self._cause(failed)
        assert cause is not None
        return self._end_all(cause, time.monotonic())

    def _refill(self) -> None:
        """One spare more, if one is missing and the ranks train: to start it takes seconds of a
        core. A step ends with a sum of all ranks, so one rank says it of all."""
        if self.spares is None or not self.spares.are_missing:
            return
        last = standing_of(launcher.told(self.store, self.started), self._here[0])
        if last is not None and last.has_stepped:
            self.spares.add_one()

    def _train(self) -> bool:
        """Whether all ranks have taken a step, and so heed signals."""
        found = self.standings()
        return len(found) == self.world_size and all(s.has_stepped for s in found.values())

    def _end_all(self, cause: FirstFailure, since: float) -> JobEnd:
        """Kills what goes on, once the rank that failed is done with its last words."""
        detected = time.monotonic() - since
        until = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until and len(self.poll()) < len(self._here):
            if cause.kind != "raised" or cause.rank in self.poll():
                break
            time.sleep(_POLL_S)
        codes = self.poll()
        self._kill()
        for process in self._processes.values():
            process.wait()
        # Gloo may abort a process whose peer has gone.
        died = {r for r, code in codes.items() if code < 0 and code != -SIGABRT}
        first = {cause.rank} if cause.kind in ("died", "hung") else set()
        lost = tuple(sorted(died | first))
        return JobEnd({**self.poll(), **codes}, cause, detected, lost=lost)

    def _cause(self, failed: Mapping[int, int]) -> FirstFailure | None:
        """What ended the job, if anything has. Where other ranks are followed elsewhere, it is said
        to those who do so: a rank that ends before it meets the others says nothing itself."""
        told = launcher.told(self.store, self.started)
        found = self._found(told, failed)
        if found is not None and failed and len(self._here) < self.world_size:
            publish(told, found)
        return found

    def _found(self, told: Store, failed: Mapping[int, int]) -> FirstFailure | None:
        """As ranks say, or as exit codes do."""
        by_signal = {rank: -code for rank, code in failed.items() if code < 0}
        # What a rank raised may end in an abort, as Gloo's threads go down with it.
        if set(by_signal.values()) == {SIGABRT} and (found := first_failure(told)):
            return found
        if by_signal:
            return self._killed(told, by_signal)
        until = time.monotonic() + (_CAUSE_S if failed else 0.0)
        while True:
            if found := first_failure(told):
                return self._left(told, found)
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_S)
        for rank, code in failed.items():
            text = f"rank {rank} ended with exit code {code}{self._where(told, rank)}"
            return FirstFailure("raised", rank, self._step(told, rank), text, f"exit code {code}")
        return None

    def _left(self, told: Store, found: FirstFailure) -> FirstFailure:
        """Of a rank whose connection broke, since it left of its own accord."""
        if found.kind != "died" or self.poll().get(found.rank) != 0:
            return found
        text = f"rank {found.rank} left with exit code 0{self._where(told, found.rank)}"
        text += ", while others need it"
        return FirstFailure("left", found.rank, self._step(told, found.rank), text)

    def _killed(self, told: Store, by_signal: Mapping[int, int]) -> FirstFailure:
        """Of ranks that a signal ended; the others wait for them, so these say which step it is."""
        time.sleep(BEAT_S + _LOOK_S)
        died = {r: -code for r, code in self.poll().items() if code < 0 and code != -SIGABRT}
        by_signal = {**died, **by_signal}
        rank = min(by_signal)
        names = {r: Signals(n).name for r, n in by_signal.items()}
        others = ", ".join(f"rank {r} by {names[r]}" for r in sorted(names) if r != rank)
        text = f"rank {rank} was killed by {names[rank]}{self._where(told, rank)}"
        text += f" (and {others})" * bool(others)
        return FirstFailure("died", rank, self._step(told, rank), text, names[rank])

    def _step(self, told: Store, rank: int) -> int:
        found = standings(told, self.world_size)
        ended = self.poll()
        steps = [s.step for r, s in found.items() if r not in ended]
        own = found[rank].step if rank in found else -1
        return max(own, min(steps, default=own))

    def _where(self, told: Store, rank: int) -> str:
        step = self._step(told, rank)
        return f", in step {step}" if step >= 0 else ", before it took a step"


def run_ranks(world_size: int, *arguments: str) -> int:
    """Runs `python -m ARGUMENTS` on so many ranks of this machine; the exit code of the job.

    Whatever ends this process ends them. SystemExit with 128 + n if signal n asked it to end.
    """
    with Ranks(world_size, ("-m", *arguments), launcher.open_store()) as ranks:
        end = ranks.wait()
    say_end(end)
    if end.asked_by and not end.saved:
        raise SystemExit(end.exit_code)
    return end.exit_code


def say_end(end: JobEnd) -> None:
    """The cause, on stderr."""
    if end.cause is not None:
        print(f"meshwright: the job ended: {end.cause.text}", file=sys.stderr, flush=True)
