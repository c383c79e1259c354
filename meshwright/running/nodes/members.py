"""Which nodes of a job are there: each supervisor says that it lives, the one who leads looks."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.running.nodes.each_beat import EachBeat
from meshwright.runtime.checkpoint.memory_place import MemoryPlace
from meshwright.runtime.world.failure import BEAT_S
from meshwright.runtime.world.stillness import Stillness

QUIET_BEATS = 8
"""A node that has not beaten while the leader looked so often is gone."""
MOST_QUIET_BEATS = 60
"""A leader that has not answered while a follower looked so often is gone, whatever the follower
has seen before."""
_TIMES = 5
"""As often as the longest wait for an answer so far; as often as a node's beats at least."""
_COUNT, _OVER = "count", "over"


@dataclass
class _Member:
    node: int
    memory: Any = None
    """Where its memory is to be reached, if it gives it."""
    beats: Stillness = field(default_factory=lambda: Stillness(b""))


@dataclass(eq=False)
class Members:
    """The leader's view of who is there."""

    store: Any
    num_nodes: int
    own: int
    """The leader's node."""
    next_start: int = 0
    """The start that whoever comes now may take part in."""
    _known: int = 0
    _waiting: dict[int, int] = field(default_factory=dict)
    """Who has come and has no node yet -> which one it asks for, -1 if any will do."""
    _here: dict[int, _Member] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)
    _looks: EachBeat = field(default_factory=lambda: EachBeat("nodes", BEAT_S))

    def watch(self) -> None:
        """From here on looks at them, on a thread."""
        self._looks.begin(self.look)

    def close(self) -> None:
        self._looks.end()

    def here(self) -> dict[int, int]:
        """Member -> node, of those that are there, without the leader."""
        with self._lock:
            return {number: member.node for number, member in self._here.items()}

    def memories(self) -> list[MemoryPlace]:
        """Of those that give theirs, without the leader's."""
        with self._lock:
            known = [(its.node, its.memory) for its in self._here.values() if its.memory]
        return [MemoryPlace(**{**memory, "node": node}) for node, memory in known]

    def begin(self, number: int) -> dict[int, int]:
        """Those that may take part in the start of that number: whoever comes later may in the next
        one, so that nobody is waited for who does not hear of it."""
        with self._lock:
            self.next_start = number + 1
            return {member: its.node for member, its in self._here.items()}

    def nodes(self) -> set[int]:
        """The nodes that are there."""
        return {self.own, *self.here().values()}

    def dismiss(self, number: int) -> None:
        """It leaves: what it had is free."""
        with self._lock:
            self._here.pop(number, None)

    def end(self, code: int, wait_s: float) -> None:
        """Tells all that the job is over, and waits until they have left, at most so long."""
        self.store.set(_OVER, str(code))
        until = time.monotonic() + wait_s
        while time.monotonic() < until and not all(
            self.store.check([f"left/{number}"]) for number in self._all()
        ):
            time.sleep(0.1)

    def _all(self) -> list[int]:
        """Also who has no node yet: whoever does not hear the end would lead the job anew."""
        with self._lock:
            return [*self._here, *self._waiting]

    def look(self) -> None:
        """Hears who has come and who still beats."""
        count = self.store.add(_COUNT, 0)
        with self._lock:
            for number in range(self._known + 1, count + 1):
                if not self.store.check([f"hello/{number}"]):
                    count = number - 1  # it has its number and has not said more: the next time
                    break
                self._waiting[number] = json.loads(self.store.get(f"hello/{number}"))
            self._known = count
            for number, member in list(self._here.items()):
                self._listen(number, member)
            for number, wanted in list(self._waiting.items()):
                self._place(number, wanted)

    def _listen(self, number: int, member: _Member) -> None:
        beat = self.store.get(key) if self.store.check([key := f"beat/{number}"]) else b""
        if member.beats.look(beat) >= QUIET_BEATS:
            del self._here[number]
            self.store.set(f"gone/{number}", "")

    def _place(self, number: int, wanted: int) -> None:
        """Gives it the node that it asks for, else the first free one; it waits if there is none:
        who was there before it may not be known to be dead yet. The leader's own is not to be had.
        """
        if wanted == self.own:
            del self._waiting[number]
            self.store.set(f"place/{number}", json.dumps({"taken": wanted}))
            return
        taken = {self.own, *(member.node for member in self._here.values())}
        free = [node for node in range(self.num_nodes) if node not in taken]
        if wanted >= 0:
            free = [node for node in free if node == wanted]
        if free:
            del self._waiting[number]
            has = self.store.check([key := f"memory/{number}"])
            memory = json.loads(self.store.get(key)) if has else None
            self._here[number] = _Member(free[0], memory)
            place = {"node": free[0], "start": self.next_start}
            self.store.set(f"place/{number}", json.dumps(place))


@dataclass(eq=False)
class Membership:
    """A follower's."""

    store: Any
    cut: Callable[[], None]
    """Breaks the connections to whoever leads: what waits there raises DistError."""
    number: int = 0
    silent: bool = False
    """Whether that was done, as nobody answered."""
    _answers: int = 0
    _closed: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def join(
        cls, store: Any, wanted: int, cut: Callable[[], None], memory: MemoryPlace | None = None
    ) -> "Membership":
        """Says that this node is there, which one it would be, -1 for any, and where its memory is
        to be reached."""
        found = cls(store, cut)
        found._begin(found._listen)
        try:
            found.number = store.add(_COUNT, 1)
            if memory is not None:
                store.set(f"memory/{found.number}", json.dumps(memory.dumps()))
            store.set(f"hello/{found.number}", json.dumps(wanted))
        except BaseException:
            found._closed.set()  # or it would cut the connections of the next meeting
            raise
        found._begin(found._beat)
        return found

    def _begin(self, what: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=what, name="node", daemon=True))
        self._threads[-1].start()

    def placed(self) -> tuple[int, int] | None:
        """The node that it is, and the first start that it may take part in, once it is known.
        PlanError if it asks for the node of the one who leads."""
        key = f"place/{self.number}"
        if not self.store.check([key]):
            return None
        place = json.loads(self.store.get(key))
        if "taken" in place:
            raise PlanError(
                f"--node {place['taken']}: the node that leads is that one; give each node a "
                "number of its own, or none of them one"
            )
        return place["node"], place["start"]

    def over(self) -> int | None:
        """The job's exit code, once there is one."""
        return int(self.store.get(_OVER)) if self.store.check([_OVER]) else None

    def is_gone(self) -> bool:
        """Whether the leader took this node for dead."""
        return bool(self.store.check([f"gone/{self.number}"]))

    def leave(self) -> None:
        """It beats no more."""
        try:
            if not self.silent:
                self.store.set(f"left/{self.number}", "")
        except (dist.DistError, RuntimeError):
            pass  # the leader has gone, too
        self._closed.set()
        for thread in self._threads:
            thread.join(QUIET_BEATS * BEAT_S)
        if any(thread.is_alive() for thread in self._threads):  # and nobody listens any more
            self.silent = True
            self.cut()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        """A leader that is stopped keeps its connections, and whoever asks it waits for good."""
        answers, limit = Stillness(0), QUIET_BEATS
        while not self._closed.wait(BEAT_S):
            longest = answers.looks
            if not answers.look(self._answers):
                limit = min(MOST_QUIET_BEATS, max(limit, _TIMES * longest))
            elif answers.looks >= limit:
                self.silent = True
                self.cut()
                return

    def _beat(self) -> None:
        key = f"beat/{self.number}"
        while not self._closed.is_set():
            try:
                self._answers = self.store.add(key, 1)  # to a `set` nobody answers
            except (dist.DistError, RuntimeError):
                return  # whoever asks the store next will see it
            self._closed.wait(BEAT_S)
