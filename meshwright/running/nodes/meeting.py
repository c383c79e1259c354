"""Where the supervisors of a job's nodes meet: a store at one of several places, each on a node.

Whoever opens the store leads. If it goes, the others meet at the next place, so that no node's
death ends the job; with one place alone, the job ends with that node, to be started again.
"""

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from meshwright.ir.errors import PlanError
from meshwright.runtime.world import launcher, silence

TURN_S = 15.0
"""Until the place after it may be opened, as whoever was to open the one before has not."""
_CONNECT_S, _PAUSE_S = 1.0, 0.2
_ANSWER_S = 10.0
"""What the store is asked for and does not have by then, is not there."""
_JOB = "job"
_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:,\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A port of a machine, as the others call it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Whether it is this machine's."""
        try:
            named = {str(info[4][0]) for info in socket.getaddrinfo(self.host, self.port)}
        except OSError:
            return False
        ours = chain.from_iterable(psutil.net_if_addrs().values())
        # Debian calls a machine 127.0.1.1 in its own /etc/hosts, which no interface has.
        loops = any(ip_address(name).is_loopback for name in named)
        return loops or not named.isdisjoint({str(address.address) for address in ours})

    def this_machine(self) -> str:
        """What others that reach the place may call this machine."""
        if self.is_here():
            return self.host
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)  # it only looks for the way: nothing is sent
            return str(way.getsockname()[0])

    def answers(self) -> bool:
        """Whether somebody has opened it."""
        try:
            socket.create_connection((self.host, self.port), _CONNECT_S).close()
        except OSError:
            return False
        return True


def parse_places(text: str) -> tuple[MeetingPlace, ...]:
    """Of `HOST:PORT,HOST:PORT`, the first of them first; PlanError if it is none such."""
    found = []
    for part in text.split(","):
        match = _PLACE.fullmatch(part.strip())
        if match is None or not 0 < int(match[2]) < 2**16:
            raise PlanError(
                f"--rdzv {text!r}: {part.strip()!r} is not HOST:PORT with a port of 1 to 65535; an "
                "example is node-0:29500, or node-0:29500,node-1:29500 so that the second may "
                "lead if the first is lost"
            )
        found.append(MeetingPlace(match[1].strip("[]"), int(match[2])))
    if len(set(found)) < len(found):
        raise PlanError(f"--rdzv {text!r} names a place twice")
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Meeting:
    """A connection to the store of all supervisors; of the one who leads, the store itself."""

    store: Store
    place: MeetingPlace
    leads: bool
    _server: TCPStore
    ports: list[int] = field(default_factory=list)
    """Of this one's connections to whoever leads: of this store, and of those of its ranks."""

    def cut(self) -> None:
        """Breaks them."""
        for port in (self.place.port, *self.ports):
            silence.cut(port)


def meet(
    places: Sequence[MeetingPlace],
    job: str,
    wait_s: float,
    *,
    gone: MeetingPlace | None = None,
    silent: bool = False,
    asked: Sequence[int] = (),
) -> Meeting | None:
    """Finds the store that somebody has opened, or opens it if it is this machine's turn. `gone` is
    the place of the one that was there: it is asked last, since only the connection may have
    broken, or who led there may be back, and it is not opened. One that was `silent` is not asked
    before another one's turn has passed.

    None after `wait_s`, or if a signal has come. PlanError if others meet there for another `job`.
    """
    first = 0 if gone is None else places.index(gone) + 1
    order = [*places[first:], *places[:first]]
    began = time.monotonic()
    while not asked and (waited := time.monotonic() - began) <= wait_s:
        for place in order:
            if silent and place == gone and waited < TURN_S:
                continue
            if place.answers() and (found := _join(place, job)):
                return found
        for place in order[: 1 + int(waited / TURN_S)]:
            if place != gone and place.is_here() and (found := _open(place, job)):
                return found
        time.sleep(_PAUSE_S)
    return None


def _open(place: MeetingPlace, job: str) -> Meeting | None:
    try:
        server = TCPStore(
            place.host, place.port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWER_S),
        )  # fmt: skip
    except (dist.DistError, RuntimeError):
        return None  # another one was quicker
    store = PrefixStore("meshwright/nodes", server)
    store.set(_JOB, job)
    return Meeting(store, place, True, server)


def _join(place: MeetingPlace, job: str) -> Meeting | None:
    try:
        with silence.cut_after(place.port, _ANSWER_S):
            server = launcher.connected(place.host, place.port, timedelta(seconds=_ANSWER_S))
            store = PrefixStore("meshwright/nodes", server)
            theirs = store.get(_JOB).decode()
    except (dist.DistError, RuntimeError):
        return None
    if theirs != job:
        raise PlanError(
            f"--rdzv {place}: others meet there for another job ({theirs}), this one is {job}; "
            "choose another port"
        )
    return Meeting(store, place, False, server)
