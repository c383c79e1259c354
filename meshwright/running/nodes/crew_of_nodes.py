"""The supervisors of a job's nodes: one leads and decides, the others start what it says.

A start is a key of the store in which they meet: plan, devices of ranks, and the ranks' own store,
which the leader opens for each start. Every supervisor follows its own ranks and writes how they
ended; the leader makes one end of all of them.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from meshwright.running.crew import JobStart, RankStarter
from meshwright.running.nodes.lease import Lease
from meshwright.running.nodes.meeting import Meeting
from meshwright.running.nodes.members import Members, Membership
from meshwright.running.ranks import JobEnd
from meshwright.running.slow_ranks import Standings
from meshwright.runtime.checkpoint.memory_place import MemoryPlace
from meshwright.runtime.world import launcher
from meshwright.runtime.world.children import GRACE_S
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.runtime.world.failure import FirstFailure

LAST_CALL_S = 30.0
"""Once there are enough nodes: until the job starts without the rest."""
GIVE_UP_S = 600.0
"""With too few nodes."""
_FAREWELL_S = 10.0
_POLL_S = 0.1


@dataclass
class LeadingCrew:
    """As the supervisor that leads sees them."""

    starter: RankStarter
    meeting: Meeting
    members: Members
    lease: Lease
    """Which it has while there are enough nodes; where another one has taken it since, LeaseLost
    goes through whatever waits here."""
    least: int
    """Nodes, without which the job waits."""
    expected: set[int]
    """Nodes that the first start waits for, for a while."""
    _known: set[int] = field(default_factory=set)
    """Members that the newest start could have."""

    def gather(self, asked: Sequence[int]) -> str:
        began = time.monotonic()
        while not asked:
            self.lease.check()
            waited, there = time.monotonic() - began, self.members.nodes()
            enough = len(there) >= self.least
            if not enough:
                self.lease.release()  # others may be more
            held = enough and self.lease.acquire()
            if held and (self.expected <= there or waited > LAST_CALL_S):
                self.expected = set()
                return ""
            if waited > GIVE_UP_S and enough:
                return f"another part of the nodes goes on: {self.lease.path} is theirs"
            if waited > GIVE_UP_S:
                return (
                    f"{len(there)} of {self.members.num_nodes} nodes are there, and it takes "
                    f"{self.least}"
                )
            time.sleep(_POLL_S)
        return ""

    def absent(self) -> set[int]:
        self.lease.check()
        away = set(range(self.members.num_nodes)) - self.members.nodes()
        return {device for node in away for device in self.starter.devices_of(node)}

    def has_more(self, lost: Collection[int]) -> bool:
        new = [n for member, n in self.members.here().items() if member not in self._known]
        return any(device not in lost for node in new for device in self.starter.devices_of(node))

    def run(
        self, start: JobStart, meanwhile: Callable[[], None],
        leave: Callable[[Standings], bool], asked: list[int],
    ) -> JobEnd:  # fmt: skip
        store = launcher.open_store(self.meeting.place.host)
        told, own = self.meeting.store, self.members.own
        ranks_of = {n: self.starter.ranks_of(start, n) for n in range(self.members.num_nodes)}
        here = self.members.begin(start.number)
        self._known, there = set(here), {own, *here.values()}
        mine = self.starter.memory_at(own, self.meeting.place.this_machine())
        memories = (*([mine] if mine else []), *self.members.memories())
        start = replace(start, token=self.lease.token, memories=memories)
        line = start.dumps() | {
            "port": store.port, "others": sorted(there - {own}), "away": sorted(self.absent())
        }  # fmt: skip
        if away := {n: r for n, r in ranks_of.items() if r and n not in there}:
            # Between the search and now: so that number is used, and nobody has ranks.
            told.set(f"start/{start.number}", json.dumps(line | {"devices": []}))
            return JobEnd({}, _gone(away, None))
        others = {m: n for m, n in here.items() if ranks_of[n]}
        first = next(n for n, ranks in ranks_of.items() if 0 in ranks)
        told.set(f"start/{start.number}", json.dumps(line))

        def asks() -> bool:
            self.lease.check()
            if not leave(ranks.standings):
                return False
            told.set(f"leave/{start.number}", "")
            return first == own

        with self.starter.ranks(start, own, store, asked) as ranks:
            meanwhile()
            ends = {own: ranks.wait(asks)}
            ends |= self._others(start, others, lambda: leave(ranks.standings), asked)
        self.lease.look()  # its ranks may have seen first that it is lost
        self.lease.check()
        gone = {n: ranks_of[n] for n in others.values() if n not in ends}
        return joined(ends, ranks_of, gone, own)

    def _others(
        self, start: JobStart, others: Mapping[int, int], leave: Callable[[], bool],
        asked: Sequence[int],
    ) -> dict[int, JobEnd]:  # fmt: skip
        """How the ranks of other nodes ended, of those that live to say it."""
        ends: dict[int, JobEnd] = {}
        told, left, until = self.meeting.store, False, float("inf")
        while (late := {m: n for m, n in others.items() if n not in ends}) and (
            time.monotonic() < until
        ):
            self.lease.check()
            if asked:  # this node leaves, and with it the store in which their ranks save
                until = min(until, time.monotonic() + GRACE_S)
            here = self.members.here()
            for number, node in late.items():
                key = f"end/{start.number}/{number}"
                if told.check([key]):
                    end = ends[node] = _end(json.loads(told.get(key)))
                    if end.asked_by:  # that node is to be free
                        self.members.dismiss(number)
                elif number not in here:
                    others = {m: n for m, n in others.items() if m != number}
            without = not self.starter.ranks_of(start, self.members.own)
            if without and not left and (asked or leave()):  # no rank here to pass the signal on
                told.set(f"leave/{start.number}", "")
                left = True
            time.sleep(_POLL_S)
        return ends

    def end(self, code: int) -> None:
        self.members.end(code, _FAREWELL_S)


def lead(
    meeting: Meeting,
    starter: RankStarter,
    lease: Lease,
    least: int,
    own: int,
    expected: set[int],
    next_start: int = 0,
) -> LeadingCrew:
    """What whoever has opened the meeting has; to be ended by closing its `members`."""
    members = Members(meeting.store, starter.cluster.num_nodes, own, next_start)
    members.watch()
    return LeadingCrew(starter, meeting, members, lease, least, expected)


def joined(
    ends: Mapping[int, JobEnd],
    ranks: Mapping[int, Sequence[int]],
    gone: Mapping[int, Sequence[int]],
    own: int,
) -> JobEnd:
    """One end of those of all nodes; `ranks` are those of each, `gone` nodes that never told one.

    Whoever has seen a rank fail with his own eyes knows best what it was.
    """
    causes = [(end.cause, node) for node, end in ends.items() if end.cause is not None]
    seen = [cause for cause, node in causes if cause.rank in ranks[node]]
    cause = next(iter([*seen, *(cause for cause, _ in causes)]), None)
    codes = {rank: code for end in ends.values() for rank, code in end.codes.items()}
    if gone and (cause is None or cause not in seen or cause.kind != "raised"):
        saved = RETRY in codes.values() or (codes and not any(codes.values()))
        if cause is not None or not saved:
            cause = _gone(gone, cause)
    lost = {rank for end in ends.values() for rank in end.lost}
    mine = ends[own]
    detected_s = max(end.detected_s for end in ends.values())
    return JobEnd(codes, cause, detected_s, mine.asked_by, tuple(sorted(lost)))


def _gone(gone: Mapping[int, Sequence[int]], seen: FirstFailure | None) -> FirstFailure:
    names = ", ".join(map(str, sorted(gone)))
    step = -1 if seen is None else seen.step
    where = f", in step {step}" if step >= 0 else ""
    also = f" (others saw: {seen.text.split(' (seen by ')[0]})" if seen is not None else ""
    first = min(rank for ranks in gone.values() for rank in ranks)
    text = f"node {names} is gone{where}{also}"
    return FirstFailure("gone", first, step, text, f"node {names} is gone")


def _end(data: Any) -> JobEnd:
    cause = None if data["cause"] is None else FirstFailure(**data["cause"])
    codes = {int(rank): code for rank, code in data["codes"].items()}
    return JobEnd(codes, cause, data["detected_s"], data["asked_by"], tuple(data["lost"]))


@dataclass
class Follower:
    """A supervisor that does what the leader says."""

    starter: RankStarter
    meeting: Meeting
    membership: Membership
    started: int = 0
    """How often the job was started, as far as it knows: who takes over goes on from there."""
    failures: tuple[str, ...] = ()
    """What ended the starts before the newest that it has heard of."""
    node: int = -1
    """The one that it asks for, then the one that it has."""
    others: set[int] = field(default_factory=set)
    """Nodes that were there at that start, without the leader's: who takes over waits for them."""
    ahead: Callable[[Sequence[int]], None] = lambda away: None
    """Searches the plan that it takes if one node more goes, beside training."""

    def run(self, asked: list[int]) -> int | None:
        """The exit code of the job; None if this node is to come anew, since it was taken for dead.
        DistError if the leader is gone."""
        number = -1
        while True:
            if (code := self.membership.over()) is not None:
                return code
            if asked:
                return RETRY
            if self.membership.is_gone():
                return None
            if number < 0 and (place := self.membership.placed()) is not None:
                self.node, number = place
                self.started = max(self.started, number)
            if number >= 0 and self.meeting.store.check([f"start/{number}"]):
                self._start(json.loads(self.meeting.store.get(f"start/{number}")), asked)
                number += 1
            time.sleep(_POLL_S)

    def _start(self, line: dict[str, Any], asked: list[int]) -> None:
        port, self.others, away = line.pop("port"), set(line.pop("others")), line.pop("away")
        devices, self.failures = tuple(line.pop("devices")), tuple(line.pop("failures"))
        memories = tuple(MemoryPlace(**place) for place in line.pop("memories"))
        start = JobStart(**line, devices=devices, failures=self.failures, memories=memories)
        self.started = start.number + 1
        own, told = self.starter.ranks_of(start, self.node), self.meeting.store
        if not own:
            return

        def asks() -> bool:
            return 0 in own and bool(told.check([f"leave/{start.number}"]))

        try:
            self.meeting.ports[:] = [port]
            store = launcher.connected(self.meeting.place.host, port)
            with self.starter.ranks(start, self.node, store, asked) as ranks:
                self.ahead(away)
                end = ranks.wait(asks)
        except dist.DistError:
            told.check([""])  # DistError: the leader is gone, not its store of the ranks alone
            # Either it goes on without this node and never reads this, or it would wait for it.
            text = f"node {self.node} has lost the store of the ranks"
            end = JobEnd({}, FirstFailure("died", own[0], -1, text, text))
        told.set(f"end/{start.number}/{self.membership.number}", json.dumps(asdict(end)))
