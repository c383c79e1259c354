"""Connections to a store break where its machine says nothing for long.

By hand, in a network of its own whose one device is taken down (`unshare -rn`): DistNetworkError
after 10.3 s; without the options, none in 45 s.
"""

import os
import socket
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from meshwright.runtime.world import launcher, silence
from meshwright.runtime.world.silence import SILENT_S


def _waits(port):
    """What TCP waits for, s, of this process's connections to a port; and whether it asks."""
    found = []
    for number in silence._sockets():
        with suppress(OSError), socket.fromfd(number, socket.AF_INET6, 1) as same:
            if same.getpeername()[1:2] == (port,):  # of other sockets it is a text
                silent = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
                asks = same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                probes = [same.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
                          for name in ("IDLE", "INTVL", "CNT")]  # fmt: skip
                found.append((silent, asks * probes[1] * probes[2], probes[0] < silent))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_a_silent_machine_is_noticed_by_whoever_waits_or_asks():
    pair = socket.socketpair()  # connections of no network are left alone
    store = launcher.open_store()
    own, before = _waits(store.port), len(os.listdir("/proc/self/fd"))
    assert own and not any(silent for silent, *_ in own), "the one whose store it is"
    other = launcher.connected("127.0.0.1", store.port)
    assert (SILENT_S, SILENT_S, True) in _waits(store.port)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(own), "no copy stays open"
    other.set("a", "b")
    assert store.get("a") == b"b"
    for one in pair:
        one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_cuts_go_on_where_a_connection_is_broken_already(monkeypatch):
    class Gone:
        def shutdown(self, how):
            cut.append(how)
            raise OSError(107, "not connected")

        def setsockopt(self, *option):
            self.shutdown(option)

    cut = []
    monkeypatch.setattr(silence, "_connections", lambda port: [Gone(), Gone()])
    silence.cut(1)
    silence.notice_silence(SimpleNamespace(port=1))
    assert len(cut) == 4


def test_connections_are_cut_as_long_as_it_takes(monkeypatch):
    """Whoever asks may connect anew."""
    cut, twice = [], threading.Event()

    def counted(port):
        cut.append(port)
        if len(cut) > 1:
            twice.set()

    monkeypatch.setattr(silence, "_PROBE_S", 0.001)
    monkeypatch.setattr(silence, "cut", counted)
    with silence.cut_after(7, 0.001):
        assert twice.wait(60.0)
    for thread in threading.enumerate():
        if thread.name == "cuts":
            thread.join(60.0)
            assert not thread.is_alive(), "and no longer"
    with silence.cut_after(8, 60.0):
        pass
    assert set(cut) == {7}
