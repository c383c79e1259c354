"""Processes that this one starts, and that do not outlive it.

A signal that would end this process is passed on to what it started and waited for. On Linux the
system ends them too if this process is killed; elsewhere only ranks notice that, within seconds.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import FrameType

import psutil

GRACE_S = 30.0
"""From the signal until what is left is killed; a batch system's usual wait."""
_POLL_S = 0.1
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_WARNING = ("SIGUSR1", "SIGUSR2")
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Runs a command to its end; its exit code, 128 + n if signal n ended it.

    If this process gets signal n itself, the command gets it too, and `grace_s` to end before it is
    killed; then SystemExit is raised with 128 + n. Nothing that the command started is left
    afterwards, nor, on Linux, when this process is killed.
    """
    ours = children_now()
    with ending_signals() as received, orphans_come_here():
        child = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=dying_with_parent()
        )
        deadline = None
        passed_on = 0
        while child.poll() is None:
            for number in received[passed_on:]:
                if number not in warning_signals():
                    deadline = deadline or time.monotonic() + grace_s
                signal_group(child.pid, number)
            passed_on = len(received)
            if deadline is not None and time.monotonic() > deadline:
                signal_group(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        signal_group(child.pid, signal.SIGKILL)  # what it left in its group
        if _prctl() is not None:
            end_orphans(ours)
    if received:
        raise SystemExit(128 + received[0])
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """Signals that would end this process, or warn of an end, are only noted inside, in the order
    they come.

    Python gives them to the main thread; called from another one, it leaves them as they are.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    main = threading.current_thread() is threading.main_thread()
    for name in (*_ENDING, *_WARNING) if main else ():
        number = getattr(signal, name, None)
        # One that is ignored, as SIGHUP under nohup, stays so.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def warning_signals() -> frozenset[int]:
    """What batch systems send ahead of a time limit: it ends nothing by itself."""
    return frozenset(getattr(signal, name) for name in _WARNING if hasattr(signal, name))


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group, if it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def die_with_parent() -> None:
    """Has Linux end this process with SIGTERM when the one that started it is gone."""
    if ask := dying_with_parent():
        ask()
        if os.getppid() == 1:  # it went before we asked
            raise SystemExit(128 + signal.SIGTERM)


def dying_with_parent() -> Callable[[], None] | None:
    """For `preexec_fn`: has Linux end the child with SIGTERM when this process is gone."""
    if (prctl := _prctl()) is None:
        return None
    return lambda: _ask(prctl, _SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _prctl() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[..., int] = ctypes.CDLL(None).prctl
    return found


def _ask(prctl: Callable[..., int], what: int, value: int) -> None:
    prctl(what, ctypes.c_ulong(value), 0, 0, 0)


@contextmanager
def orphans_come_here() -> Iterator[None]:
    """What a child leaves behind when it is killed becomes a child of this process."""
    prctl = _prctl()
    if prctl is not None:
        _ask(prctl, _SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        if prctl is not None:
            _ask(prctl, _SET_CHILD_SUBREAPER, 0)


def end_orphans(ours: Set[int]) -> None:
    """Kills what became ours since its parent died, and what that leaves, until nothing is.

    `ours` were here before; what this process forked to compute something is its own, too.
    """
    while orphans := children_now() - ours - {p.pid for p in multiprocessing.active_children()}:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children_now() -> set[int]:
    """Pids of the processes that this one has started and not yet waited for."""
    return {child.pid for child in psutil.Process().children()}
