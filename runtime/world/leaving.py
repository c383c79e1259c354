"""A rank that is asked to end: after the step it is in, with its files closed."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from meshwright.runtime.world.children import warning_signals

LEAVE_S = 10.0
"""From the signal until a rank that is stuck in a step leaves all the same."""
LEAVE = "MESHWRIGHT_LEAVE_S"
"""Environment variable: seconds for jobs that save, where the batch system waits longer."""
_ASKING = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


@dataclass(slots=True)
class LeaveRequest:
    """The signal by which this rank was asked to end, if it was."""

    by: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """As shells count it."""
        return 0 if self.by is None else 128 + self.by


@contextmanager
def leaving(
    tell: Callable[[str], None], at_last: Callable[[], None], leave_s: float | None = None
) -> Iterator[LeaveRequest]:
    """Inside, a signal to end is only noted, for the loop to look at between steps.

    `tell` gets its name at once. If the block is not over `leave_s` (`LEAVE_S`) later, the process
    calls `at_last` and exits: its main thread may be stuck where no signal reaches it. SIGUSR1 and
    SIGUSR2, warnings of a time limit, ask the same without a deadline, unless somebody else handles
    them; outside the block they are as they were (`warnings_change_nothing`). Python gives signals
    to the main thread; called from another one, it leaves them as they are.
    """
    asked = LeaveRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    deadline_s = LEAVE_S if leave_s is None else leave_s

    def note(number: int, frame: FrameType | None) -> None:
        asked.by = asked.by or signal.Signals(number)
        if number in kept:
            tell(signal.Signals(number).name)

    # Of a signal the system writes the number here, whatever the main thread is doing.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    over = threading.Event()
    numbers = {getattr(signal, name) for name in _ASKING if hasattr(signal, name)}
    kept = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    watcher = threading.Thread(
        target=_watch, args=(reader, over, set(kept), tell, at_last, deadline_s), name="leaving",
        daemon=True,
    )  # fmt: skip
    unhandled = (signal.SIG_DFL, signal.SIG_IGN)
    free = [n for n in warning_signals() if signal.getsignal(n) in unhandled]
    watcher.start()
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, note) for number in (*kept, *free)}
    try:
        yield asked
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writer.close()
        watcher.join()
        reader.close()


def warnings_change_nothing() -> None:
    """From here on warnings outside of `leaving` are ignored, by a process that is the job's alone:
    one that comes when the last step is done would kill it while it writes what it has done."""
    for number in warning_signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _watch(
    reader: socket.socket, over: threading.Event, numbers: set[int], tell: Callable[[str], None],
    at_last: Callable[[], None], leave_s: float,
) -> None:  # fmt: skip
    while received := reader.recv(1):
        if received[0] not in numbers:
            continue
        name = signal.Signals(received[0]).name
        tell(name)  # the main thread's handler may have to wait for what a step waits for
        if over.wait(leave_s):
            return
        print(f"meshwright: {name}: a step is not over after {leave_s:g} s", file=sys.stderr)
        try:
            at_last()
        finally:
            sys.stderr.flush()
            os._exit(128 + received[0])
