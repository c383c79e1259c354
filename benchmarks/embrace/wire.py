"""A wire between ranks that is slow in truth: each rank has a network of its own, and the kernel
lets it send and receive so many bits a second.

The parent's network becomes a switch: a bridge. Each rank has one cable to it, an Ethernet pair of
which one end is alone in the network of the rank; a token bucket at either end gives it its speed.
Gloo's sockets go through it, whoever opens them: every library that is compared has the same wire.
It needs Linux and the right to make networks: root, or `unshare -rn` before the command.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence

CLONE_NEWNET = 0x40000000
SWITCH, CABLE = "switch0", "wire0"
BURST_BYTES, WAITING_BYTES = 2**17, 2**28
"""What goes at once; what may wait in a queue before any of it is lost."""
MTU = 9000
HEADERS_LEAVE = 0.99
"""Of the bits of a wire, for payload, at this size of packets."""


class NoWire(RuntimeError):
    """This process may not make networks."""


def be_a_switch() -> None:
    """Gives this process a network of its own with nothing in it but a switch; NoWire if it may not
    do that."""
    _own_network()
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", SWITCH, "type", "bridge")
    _run("ip", "link", "set", SWITCH, "mtu", str(MTU), "up")


def plug_in() -> "Wire":
    """Gives this process, a child of a switch, a network of its own with a cable to the switch, and
    has Gloo use it. To be called before a process group is made."""
    switch = os.getppid()
    _own_network()
    far = f"port{os.getpid()}"
    outside: Sequence[str] = ("nsenter", f"--net=/proc/{switch}/ns/net")
    _run("ip", "link", "set", "lo", "up")
    _run(*outside, "ip", "link", "add", far, "mtu", str(MTU), "type", "veth",
         "peer", "name", CABLE, "mtu", str(MTU), "netns", str(os.getpid()))  # fmt: skip
    _run(*outside, "ip", "link", "set", far, "master", SWITCH, "up")
    _run("ip", "address", "add", f"{_address()}/8", "dev", CABLE)
    _run("ip", "link", "set", CABLE, "up")
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    return Wire(far, outside)


class Wire:
    """The cable of one rank."""

    def __init__(self, far: str, outside: Sequence[str]) -> None:
        self._ends = (((), CABLE), (outside, far))
        self._shaped = False

    def shape(self, bits_per_s: float | None) -> None:
        """So fast in either direction from now on; None: as fast as the kernel is."""
        for before, name in self._ends:
            queue = ("tc", "qdisc")
            if bits_per_s is not None:
                _run(*before, *queue, "replace", "dev", name, "root", "tbf",
                     "rate", f"{bits_per_s:.0f}bit", "burst", str(BURST_BYTES),
                     "limit", str(WAITING_BYTES))  # fmt: skip
            elif self._shaped:
                _run(*before, *queue, "del", "dev", name, "root")
        self._shaped = bits_per_s is not None


def _address() -> str:
    """Nobody had it before: networks of ranks that are gone stay for a moment, and answer."""
    return ".".join(map(str, (os.getpid() | 10 << 24).to_bytes(4, "big")))


def _own_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        raise NoWire(
            f"a network of its own for each rank: {why}; run it as root, or put `unshare -rn` "
            "before the command"
        )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoWire(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
