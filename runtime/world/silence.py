"""A machine that goes without closing its connections, as when its power fails.

TCP itself waits for a quarter of an hour, and so would whoever asks a store that was there.
"""

import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SILENT_S = 10
"""From the last sign of the other machine until its connections are broken."""
_PROBE_S = 2


def notice_silence(store: "TCPStore") -> None:
    """Has Linux break this process's connections to a store's port if its machine is silent: what
    waits there raises DistError. Elsewhere TCP waits as long as it does."""
    if sys.platform != "linux":
        return
    for same in _connections(store.port):
        with suppress(OSError):  # it has been closed since
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, _PROBE_S), (socket.TCP_KEEPINTVL, _PROBE_S),
                (socket.TCP_KEEPCNT, SILENT_S // _PROBE_S),
                (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
            ):  # fmt: skip
                same.setsockopt(socket.IPPROTO_TCP, option, value)


def cut(port: int) -> None:
    """Breaks this process's connections to a port: whoever waits there for an answer raises
    DistError. A process that is stopped keeps its connections, and no time-out of a store's
    operations holds there."""
    if sys.platform != "linux":
        return
    for same in _connections(port):
        with suppress(OSError):  # it is broken already
            same.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_after(port: int, seconds: float) -> Iterator[None]:
    """Breaks connections to a port, also new ones, once the block has taken so long."""
    done = threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not done.wait(wait_s):
            cut(port)
            wait_s = _PROBE_S / 4

    threading.Thread(target=watch, name="cuts", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _connections(port: int) -> Iterator[socket.socket]:
    """Those of this process to a port, as sockets of their own that share them."""
    for number in _sockets():
        with (
            suppress(OSError),  # it is closed by now, or no connection
            socket.fromfd(number, socket.AF_INET6, socket.SOCK_STREAM) as same,
        ):
            if same.getpeername()[1:2] == (port,):
                yield same


def _sockets() -> list[int]:
    """Open ones of this process."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return [number for number in numbers if _is_socket(number)]


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
