"""Supervisors of several machines: they meet, one leads, and a node that goes is gone on without.

Whole jobs on two nodes, with a node and a leader killed: `python -m benchmarks.faults node`.
"""

import json
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan_io import dumps
from meshwright.running import elastic
from meshwright.running import ranks as running_ranks
from meshwright.running.crew import JobStart, RankStarter
from meshwright.running.elastic import Supervisor, check_elastic, take_part
from meshwright.running.memory_server import MemoryServer
from meshwright.running.nodes import crew_of_nodes, members
from meshwright.running.nodes import meeting as meeting_file
from meshwright.running.nodes.crew_of_nodes import Follower, LeadingCrew, joined, lead
from meshwright.running.nodes.lease import Lease, LeaseLost
from meshwright.running.nodes.meeting import MeetingPlace, meet, parse_places
from meshwright.running.nodes.members import MOST_QUIET_BEATS, QUIET_BEATS, Members, Membership
from meshwright.running.nodes.nodes_choice import NodesChoice
from meshwright.running.ranks import JobEnd, Ranks
from meshwright.running.replan import Replanner
from meshwright.runtime.checkpoint import fence
from meshwright.runtime.checkpoint.memory_place import MemoryPlace
from meshwright.runtime.checkpoint.node_memory import MEMORY, NodeMemory, given_memory
from meshwright.runtime.world import children, launcher
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.runtime.world.failure import FirstFailure
from tests.planner.problems import cluster
from tests.tools.report.plans import piped

ONE = cluster(2)
TWO = replace(ONE, name="two", nodes=ONE.nodes * 2, between_nodes=ONE.nodes[0].link)
WAIT_S = 60.0


def _places(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [MeetingPlace("127.0.0.1", one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return found


def test_what_was_asked_for_is_read_or_refused():
    assert parse_places("a:1, [::1]:65535") == (MeetingPlace("a", 1), MeetingPlace("::1", 65535))
    assert str(parse_places("[::1]:9")[0]) == "[::1]:9"
    for text in ("", "a", "a:0", "a:65536", "a:1,", "a b:1", "a:1,a:1"):
        with pytest.raises(PlanError, match="--rdzv"):
            parse_places(text)
    assert MeetingPlace("localhost", 1).is_here() and MeetingPlace("127.0.1.1", 1).is_here()
    assert not MeetingPlace("192.0.2.1", 1).is_here()
    found = NodesChoice.parse("a:1", "1:2", 1)
    found.check(TWO)
    assert (found.least_of(2), NodesChoice.parse("a:1", None, None).least_of(4)) == (1, 3)
    for nodes, node, says in (("x", None, "MIN:MAX"), ("0:2", None, "MIN:MAX"),
                              ("1:3", None, "nearest is 1:2"), ("3", None, "nearest is 2:2"),
                              (None, 2, "nearest is 1")):  # fmt: skip
        with pytest.raises(PlanError, match=says):
            NodesChoice.parse("a:1", nodes, node).check(TWO)
    with pytest.raises(PlanError, match="has one"):
        found.check(ONE)
    with pytest.raises(PlanError, match="--rdzv HOST:PORT"):
        check_elastic(None, Cluster.preset("a100-80", num_nodes=2))


def test_they_meet_at_the_first_place_and_then_at_the_next():
    first, second = _places(2)
    leader = meet([first, second], "job", WAIT_S)
    assert leader.leads and leader.place == first
    follower = meet([first, second], "job", WAIT_S)
    assert not follower.leads and follower.place == first
    with pytest.raises(PlanError, match="for another job"):
        meet([first], "other", WAIT_S)
    assert meet([first, second], "job", WAIT_S, gone=first).place == first, "it is still there"
    assert meet([second], "job", WAIT_S, asked=[15]) is None
    del leader
    with pytest.raises(dist.DistError):
        follower.store.check(["job"])
    assert meet([first], "job", 0.3, gone=first) is None, "nobody takes over"
    # One that comes back finds whoever leads now, wherever that is.
    taken = meet([first, second], "job", WAIT_S, gone=first)
    assert taken.leads and taken.place == second
    assert meet([first, second], "job", WAIT_S).place == second


def _member(store, number):
    return Membership(store, lambda: None, number)


def test_the_leader_knows_who_is_there():
    store = HashStore()
    here = Members(store, 3, own=0)
    one = _member(store, store.add(members._COUNT, 1))
    here.look()  # it has a number, and has not said anything
    assert here.nodes() == {0} and one.placed() is None
    place = MemoryPlace(-1, "b", 1234, "secret")
    store.set(f"memory/{one.number}", json.dumps(place.dumps()))
    store.set(f"hello/{one.number}", json.dumps(-1))
    here.look()
    assert here.nodes() == {0, 1} and one.placed() == (1, 0)
    assert here.memories() == [replace(place, node=1)], "of the node that it has been given"
    other = _member(store, store.add(members._COUNT, 1))
    store.set(f"hello/{other.number}", json.dumps(1))
    for beat in range(QUIET_BEATS):
        store.set(f"beat/{one.number}", str(beat))
        here.look()
    assert other.placed() is None and not one.is_gone(), "its node is there"
    assert here.begin(3) == {one.number: 1}
    for _ in range(QUIET_BEATS):
        here.look()
    assert one.is_gone() and other.placed() == (1, 4) and here.nodes() == {0, 1}
    assert here.memories() == [], "who came in its place gives none"
    here.dismiss(other.number)
    assert here.nodes() == {0} and not other.is_gone()
    third = _member(store, store.add(members._COUNT, 1))
    store.set(f"hello/{third.number}", json.dumps(0))
    here.look()
    with pytest.raises(PlanError, match="--node 0: the node that leads"):
        third.placed()


def test_the_end_is_heard_by_all_before_the_leader_goes(monkeypatch):
    """Also by one that came a moment before and has no node yet."""
    store = HashStore()
    here = Members(store, 2, own=0)
    numbers = [store.add(members._COUNT, 1) for _ in range(2)]
    for number in numbers:
        store.set(f"hello/{number}", json.dumps(1))
    here.look()
    heard = []

    def sleep(seconds):
        heard.append(_member(store, numbers[len(heard)]).over())
        store.set(f"left/{numbers[len(heard) - 1]}", "")

    monkeypatch.setattr(members.time, "sleep", sleep)
    here.end(3, WAIT_S)
    assert heard == [3, 3]


def test_one_alone_holds_the_lease(tmp_path, monkeypatch):
    path = tmp_path / "saved/leader"
    one, other, third = (Lease(path) for _ in range(3))
    assert one.acquire() and not other.acquire(), "of two, one has it"
    for _ in range(2 * QUIET_BEATS):  # it beats
        one.look()
        other.look()
    assert not other.acquire()
    monkeypatch.setenv(*fence.named_by(path, one.token).popitem())
    fence.check_held()
    for _ in range(QUIET_BEATS + 1):  # `one` is stopped
        other.look()
        third.look()
    assert not other.acquire() and not third.acquire(), "both take it, and are not sure"
    for _ in range(2):
        other.look()
        third.look()
    assert third.acquire()
    with pytest.raises(PlanError, match="another node leads"):
        fence.check_held()
    with pytest.raises(LeaseLost):
        other.check()
    one.check()
    one.look()  # it goes on
    with pytest.raises(LeaseLost):
        one.check()
    one.check()
    one.release()  # what is another one's stays
    assert third.acquire() and not one.acquire()
    path.unlink()
    third.look()
    assert path.exists() and not one.acquire(), "somebody has removed the file"
    third.close()
    assert one.acquire() and not list(path.parent.glob("leader.*"))
    for _ in range(2 * QUIET_BEATS):  # `one` has it, then leaves it: there is no file for long
        other.look()
        one.release()
    assert third.acquire()
    assert not other.acquire() and third.acquire(), "a file that has just come was not quiet"
    path.unlink()
    third.release()
    third.look()
    assert not path.exists(), "it was let go, though it had gone"
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        Lease(tmp_path / "file/leader").acquire()


def test_a_leader_that_is_stopped_is_left(monkeypatch):
    """It keeps its connections: who asks it would wait for good, and so would who connects."""
    monkeypatch.setattr(members, "BEAT_S", 0.05)
    monkeypatch.setattr(meeting_file, "_ANSWER_S", 1.0)
    code = (
        "import sys, time; from meshwright.running.nodes.meeting import *; "
        "found = meet(parse_places(sys.argv[1]), 'job', 60.0); print(flush=True); time.sleep(100)"
    )
    places = _places(2)
    text = ",".join(map(str, places[:1]))
    command = [sys.executable, "-c", code, text]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as leader:
        leader.stdout.readline()
        found = meet(places, "job", WAIT_S)
        membership = Membership.join(found.store, 1, found.cut)
        assert not found.leads and not membership.is_gone()
        leader.send_signal(signal.SIGSTOP)
        with pytest.raises(dist.DistError):
            while True:
                membership.is_gone()
        membership.leave()
        assert membership.silent
        assert meeting_file._join(places[0], "job") is None
        mine = meet(places, "job", WAIT_S, gone=places[0], silent=True)
        assert mine.leads and mine.place == places[1]
        leader.kill()


def test_who_leaves_waits_for_no_leader_that_was_stopped_meanwhile(monkeypatch):
    monkeypatch.setattr(members, "BEAT_S", 0.05)
    asked, cut = threading.Event(), threading.Event()

    def add(key, count):
        if key.startswith("beat"):
            asked.set()
            cut.wait(WAIT_S)
            raise dist.DistError("broken off")
        return 1

    store = SimpleNamespace(add=add, set=lambda key, value: None)
    membership = Membership.join(store, -1, cut.set)
    assert asked.wait(WAIT_S)
    membership.leave()
    assert cut.is_set() and membership.silent


def test_a_leader_that_was_slow_before_is_waited_for_longer():
    looks, cut_at = [], []
    membership = Membership(None, lambda: cut_at.append(len(looks)))

    def script():
        for quiet in (QUIET_BEATS - 1, 34, 100):
            membership._answers += 1
            yield from [False] * (1 + quiet)

    steps = script()
    membership._closed = SimpleNamespace(wait=lambda _: looks.append(1) or next(steps, True))
    membership._listen()
    assert cut_at == [1 + 7 + 1 + 34 + 1 + MOST_QUIET_BEATS] and membership.silent


class _Broken(dict):
    """A store whose connection breaks."""

    def add(self, key, number):
        raise dist.DistNetworkError


def test_a_join_that_fails_cuts_nothing_later(monkeypatch):
    monkeypatch.setattr(members, "BEAT_S", 0.001)
    cuts, before = [], set(threading.enumerate())
    with pytest.raises(dist.DistNetworkError):
        Membership.join(_Broken(), 1, lambda: cuts.append(1))
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert not cuts


def test_who_leads_waits_for_nodes_and_for_the_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_of_nodes, "GIVE_UP_S", -1.0)  # said at the first look
    lease, other = Lease(tmp_path / "leader"), Lease(tmp_path / "leader")
    there = SimpleNamespace(num_nodes=2, nodes=lambda: nodes)
    crew = LeadingCrew(RankStarter(TWO, tmp_path, ()), None, there, lease, 2, set())
    nodes = {0}
    assert lease.acquire() and crew.gather([]).startswith("1 of 2 nodes are there")
    assert other.acquire(), "it is left to others, who may be more"
    nodes = {0, 1}
    assert crew.gather([]).startswith("another part of the nodes goes on")
    other.release()
    assert crew.gather([]) == "" and not other.acquire()


def test_ranks_know_whose_lease_theirs_is(tmp_path):
    plan = piped(1, 2, 4, 4)
    starter = RankStarter(TWO, tmp_path, (), lease=tmp_path / "leader")
    start = JobStart(0, dumps(plan), tuple(range(plan.world_size)), token="mine")
    assert starter.ranks(start, 0, None, []).extra[fence.HELD] == f"mine:{tmp_path / 'leader'}"


def test_ranks_know_the_memory_of_nodes(tmp_path, monkeypatch):
    """Of four nodes of two devices the third one rests; all give their memory."""
    four = replace(ONE, name="four", nodes=ONE.nodes * 4, between_nodes=ONE.nodes[0].link)
    plan = piped(1, 6, 4, 12)
    places = tuple(MemoryPlace(node, f"n{node}", 1, "secret") for node in range(4))
    start = JobStart(7, dumps(plan), (0, 1, 2, 3, 6, 7), token="mine", memories=places)

    def given(node, start=start, **more):
        starter = RankStarter(four, tmp_path, (), **{"memory": tmp_path / "m", **more})
        extra = starter.ranks(start, node, None, []).extra
        monkeypatch.setenv(MEMORY, extra.get(MEMORY, ""))
        return given_memory()

    assert [given(node).neighbour for node in (0, 1, 3)] == [1, 3, 0]
    assert given(1) == NodeMemory(
        tmp_path / "m", "000007-mine", 1, 3, (places[0], places[2], places[3])
    )
    assert given(1, copies=False).neighbour == -1 and given(1, memory=None) is None
    assert given(1, replace(start, memories=places[:3])) is None, "node 3 has none: all or nobody"
    assert given(1, replace(start, memories=(*places[:2], places[3]))) is not None
    alone = replace(start, plan=dumps(piped(1, 2, 4, 4)), devices=(2, 3), memories=())
    assert given(1, alone) == NodeMemory(tmp_path / "m", "000007-mine", 1)
    many = tuple(MemoryPlace(n, f"10.11.{n // 256}.{n % 256}", 30000 + 37 * n % 9999,
                             secrets.token_hex(16)) for n in range(2048))  # fmt: skip
    memory = NodeMemory(tmp_path / "m", "000007-mine", 1, 3, many)
    monkeypatch.setenv(MEMORY, memory.dumps())
    assert len(memory.dumps()) < 100_000, "Linux takes no variable of 128 KiB"
    assert given_memory() == memory


def test_a_node_takes_files_of_the_start_under_way(tmp_path):
    plan = piped(1, 2, 4, 4)
    taken = []
    starter = RankStarter(TWO, tmp_path, (), server=SimpleNamespace(accept=taken.append))
    for number in (3, 4):
        start = JobStart(number, dumps(plan), (0, 1), token="mine")
        starter.ranks(start, 0, None, [])
    assert taken == ["000003-mine", "000004-mine"]


def test_this_machine_is_called_what_others_can_reach(monkeypatch):
    place = MeetingPlace("127.0.0.5", 9)
    assert place.this_machine() == "127.0.0.5", "the place is here: so do others call it"
    monkeypatch.setattr(MeetingPlace, "is_here", lambda _: False)
    assert place.this_machine() == "127.0.0.1", "the end of the way there"


def test_ranks_end_once_the_lease_is_lost(tmp_path, monkeypatch):
    def asked(_):
        raise AssertionError("nobody asks for more devices then")

    with _two_nodes(tmp_path, monkeypatch, WAIT) as (crew, *_):
        crew.gather([])
        lose = partial(setattr, crew.lease, "_lost", True)
        with pytest.raises(LeaseLost):
            crew.run(_start(0, (0, 1)), lose, asked, [])


def test_who_waits_for_a_device_hears_that_he_leads_no_more(tmp_path):
    lease = Lease(tmp_path / "leader")
    there = SimpleNamespace(num_nodes=2, nodes=lambda: setattr(lease, "_lost", True) or {0})
    crew = LeadingCrew(RankStarter(TWO, tmp_path, ()), None, there, lease, 1, set())
    supervisor = Supervisor(None, tmp_path, crew, 10.0, lost={0: time.monotonic() + 10.0})
    with pytest.raises(LeaseLost):
        supervisor._await_device([])


class _Deposed:
    """A supervisor that leads twice: the first time another node takes the lease over."""

    led, crew = 0, None

    def run(self, asked):
        self.led += 1
        if self.led == 1:
            self.started, self.failures = 4, [FirstFailure("died", 1, 5, "x")]
            raise LeaseLost("another node leads")
        self.there = self.started, self.failures
        return 0

    def say(self, text):
        self.said = text


def test_a_leader_that_has_lost_the_lease_comes_again(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "BEAT_S", 0.02)
    supervisor, places = _Deposed(), _places(1)
    lease, choice = Lease(tmp_path / "leader"), NodesChoice(places, 1, 2, 1)
    starter = RankStarter(TWO, tmp_path, ())
    assert take_part(supervisor, starter, lease, choice, "job", []) == 0
    assert supervisor.said == "node 1 leads no more: another node leads"
    # It had to let go of its store, or the second time the place were not free.
    assert supervisor.there == (5, [FirstFailure("died", 1, 5, "x")])


def test_who_follows_says_where_its_memory_is(tmp_path, monkeypatch):
    told, place = [], MeetingPlace("127.0.0.1", 9)
    meetings = iter([SimpleNamespace(leads=False, place=place, store=None, cut=None), None])

    def join(*given):
        told.append(given)
        raise dist.DistError

    monkeypatch.setattr(elastic, "meet", lambda *_, **__: next(meetings))
    monkeypatch.setattr(Membership, "join", join)
    supervisor, choice = SimpleNamespace(say=lambda _: None), NodesChoice([place], 1, 2, 1)
    with MemoryServer(tmp_path) as server:
        starter = RankStarter(TWO, tmp_path, (), server=server)
        assert take_part(supervisor, starter, None, choice, "job", []) == RETRY
        assert told == [(None, 1, None, server.place(1, "127.0.0.1"))]


def test_a_node_that_goes_time_and_again_is_not_taken_back_at_once(tmp_path):
    supervisor = Supervisor(None, tmp_path, _Away(), 10.0)
    for wait_s in (0.0, 10.0, 20.0):
        supervisor._lose([2, 3], free=1)
        left = [at - time.monotonic() for at in supervisor.lost.values()]
        assert left == pytest.approx([wait_s] * 2 * bool(wait_s), abs=1.0)
    assert not supervisor._may_do_better(dict)
    supervisor.lost[2] = time.monotonic()
    assert not supervisor._may_do_better(dict), "it may be tried again, and is not there"
    supervisor.lost[1] = time.monotonic()
    assert supervisor._may_do_better(dict)


class _Away:
    """A crew without its second node."""

    def absent(self):
        return {2, 3}

    def has_more(self, lost):
        return False


@dataclass(frozen=True)
class _Scripted(RankStarter):
    """Ranks are small scripts, without torch."""

    scripts: tuple[str, ...] = ()
    memories: list = field(default_factory=list)
    """Those of which each node knew in each start."""

    def memory_at(self, node, host):
        return MemoryPlace(node, host, 9, f"secret {node}")

    def ranks(self, start, node, store, asked):
        self.memories.append(start.memories)
        own = self.ranks_of(start, node)
        code = f"import os, sys, time; {self.scripts[start.number]}"
        size = len(start.devices)
        return Ranks(size, ("-c", code), store, start.number, {}, asked, own=own, node=node)


@contextmanager
def _two_nodes(tmp_path, monkeypatch, *scripts):
    """A leader's crew, and how a follower on a thread ends; with the signals that it has."""
    monkeypatch.setattr(members, "BEAT_S", 0.02)
    monkeypatch.setattr(members, "QUIET_BEATS", 10**6)
    monkeypatch.setattr(crew_of_nodes, "_POLL_S", 0.02)
    # Both are in one process here, and neither is to take the other's ranks for its orphans.
    monkeypatch.setattr(children, "end_orphans", lambda ours: None)
    starter = _Scripted(TWO, tmp_path, (), scripts=scripts)
    places, asked, codes = _places(1), [], []
    lease = Lease(tmp_path / "saved/leader")
    crew = lead(meet(places, "job", WAIT_S), starter, lease, 2, 0, {0, 1})

    def follow():
        found = meet(places, "job", WAIT_S)
        mine = starter.memory_at(1, "the other")
        follower = Follower(starter, found, Membership.join(found.store, -1, found.cut, mine))
        with suppress(dist.DistError):
            codes.append(follower.run(asked))
        follower.membership.leave()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield crew, asked, codes
    finally:
        crew.end(0)
        crew.members.close()
        thread.join()


def _start(number, devices=(0, 1, 2, 3)):
    return JobStart(number, "{}", devices)


def _run(crew, start):
    return crew.run(start, lambda: None, lambda _: False, [])


WAIT = "time.sleep(100)"
ENVIRONMENT = "[os.environ[x] for x in ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')]"


def test_two_nodes_run_one_job(tmp_path, monkeypatch):
    right = "[['0','0','2','0'],['1','1','2','0'],['2','0','2','1'],['3','1','2','1']]"
    scripts = (
        f"sys.exit({ENVIRONMENT} not in {right})",
        f"os.environ['RANK'] == '2' and os.kill(os.getpid(), 9); {WAIT}",
    )
    with _two_nodes(tmp_path, monkeypatch, *scripts) as (crew, _, codes):
        assert crew.gather([]) == "" and crew.absent() == set()
        end = _run(crew, _start(0))
        assert end.codes == dict.fromkeys(range(4), 0) and end.cause is None and not end.exit_code
        assert not crew.has_more(())
        hosts = enumerate(("127.0.0.1", "the other"))
        both = tuple(crew.starter.memory_at(node, host) for node, host in hosts)
        assert crew.starter.memories == [both, both]
        end = _run(crew, _start(1))
        assert end.cause.text == "rank 2 was killed by SIGKILL, before it took a step"
        assert end.lost == (2,) and end.exit_code == 137 and len(end.codes) == 4
    assert codes == [0]


def test_what_one_node_alone_sees_ends_the_ranks_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(running_ranks, "_CAUSE_S", 0.1)
    monkeypatch.setattr(crew_of_nodes, "GRACE_S", 0.2)
    scripts = (
        f"os.environ['RANK'] == '2' and sys.exit(3); {WAIT}",
        WAIT,
        f"os.environ['RANK'] in '01' or {WAIT}",
    )
    with _two_nodes(tmp_path, monkeypatch, *scripts) as (crew, _, codes):
        crew.gather([])
        end = _run(crew, _start(0))
        assert end.cause.text == "rank 2 ended with exit code 3, before it took a step"
        assert end.exit_code == 3 and len(end.codes) == 4
        end = crew.run(_start(1, (2, 3)), lambda: None, lambda _: False, [signal.SIGTERM])
        assert end.cause.text == "node 1 is gone", "which had ranks that did not leave"
        assert crew.meeting.store.check(["leave/1"]), "they were asked: the leader has none to ask"

        def refuse(host, port):
            raise dist.DistNetworkError

        monkeypatch.setattr(launcher, "connected", refuse)
        end = _run(crew, _start(2))
        assert end.cause.text == "node 1 has lost the store of the ranks" and not end.lost
    assert codes == [0]


class _TakesOver:
    """A supervisor that leads at once, and is done."""

    started, failures, crew, replanner = 0, (), None, Replanner(None, TWO, None)

    def run(self, asked):
        self.there = self.crew.members.own, self.crew.members.next_start, self.crew.expected
        return 0

    def say(self, text):
        self.said = text


def test_who_takes_over_goes_on_counting(tmp_path, monkeypatch):
    """Also where it came between two starts, and has heard of none: else ranks would take the
    folder of checkpoints for another job's."""
    monkeypatch.setattr(members, "BEAT_S", 0.02)
    failure = FirstFailure("died", 1, 5, "x")
    begin, ask, join, tried = Follower._start, Membership.placed, Membership.join, []

    def start(self, *args):
        begin(self, *args)
        self.meeting.store.set("heard", "")

    def placed(self):
        if found := ask(self):
            self.store.set("placed", "")
        return found

    def broken_at_first(store, *more):
        tried.append(store)
        if len(tried) == 1:
            raise dist.DistNetworkError
        return join(store, *more)

    monkeypatch.setattr(Membership, "join", broken_at_first)
    monkeypatch.setattr(Follower, "_start", start)
    monkeypatch.setattr(Membership, "placed", placed)
    for until, heard in (("hello/1", False), ("placed", False), ("heard", True)):
        places, known = _places(2), 3 * (until != "hello/1")
        meeting = meet(places, "job", WAIT_S)
        lease = Lease(tmp_path / "leader")
        crew = lead(meeting, RankStarter(TWO, tmp_path, ()), lease, 1, 0, set(), 3)
        if not known:
            crew.members.close()  # it never hears which node it is
        supervisor, choice = _TakesOver(), NodesChoice(places, 1, 2, -1 if known else 1)
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(take_part, supervisor, crew.starter, lease, choice, "job", [])
            if heard:
                line = JobStart(3, "{}", (0, 1), (failure.dumps(),)).dumps()
                meeting.store.set(
                    "start/3", json.dumps(line | {"port": 0, "others": [1], "away": []})
                )
            while not meeting.store.check([until]):
                time.sleep(0.01)
            crew.members.close()
            del meeting, crew
            assert code.result(WAIT_S) == 0
        assert supervisor.started == known + heard and supervisor.failures == [failure] * heard
        assert supervisor.there == (1, known + heard, {1} if heard else {0, 1})


def test_a_node_that_is_asked_to_end_is_free_and_may_come_again(tmp_path, monkeypatch):
    there = f"os.path.join({str(tmp_path)!r}, os.environ['RANK'])"
    leave = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); "
        f"open({there}, 'w').close(); "
        f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(tmp_path / 'left')!r}), 1)]; "
        "sys.exit(75)"
    )

    def ask():
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        asked.append(signal.SIGTERM)
        (tmp_path / "left").touch()  # as ranks of the other node agree to leave, too

    with _two_nodes(tmp_path, monkeypatch, leave) as (crew, asked, codes):
        crew.gather([])
        end = crew.run(_start(0), ask, lambda _: False, [])
        assert end.saved and not end.asked_by and crew.absent() == {2, 3}
        until = time.monotonic() + WAIT_S
        while not codes and time.monotonic() < until:
            time.sleep(0.02)
        assert codes == [RETRY]
        end = _run(crew, _start(1))
        assert end.cause.text == "node 1 is gone" and not end.codes, "since the search"
        found = meet([crew.meeting.place], "job", WAIT_S)
        again = Membership.join(found.store, 1, found.cut)
        while not crew.has_more(()):
            time.sleep(0.02)
        assert again.placed() == (1, 2) and crew.absent() == set()
        again.leave()


def _died(rank, by, seen=()):
    cause = FirstFailure("died", rank, 5, f"rank {rank} died, seen by {by}")
    return JobEnd(dict.fromkeys(seen, 1), cause, 1.0, lost=(rank,))


def test_one_end_of_those_of_all_nodes():
    ranks = {0: [0, 1], 1: [2, 3]}
    end = joined({0: _died(2, 0, [0, 1]), 1: _died(2, 1, [2, 3])}, ranks, {}, own=0)
    assert end.cause.text == "rank 2 died, seen by 1" and end.lost == (2,) and len(end.codes) == 4
    end = joined({0: _died(2, 0, [0, 1])}, ranks, {1: [2, 3]}, own=0)
    assert end.cause.text == "node 1 is gone, in step 5 (others saw: rank 2 died, seen by 0)"
    end = joined({0: JobEnd({0: RETRY, 1: RETRY})}, ranks, {1: [2, 3]}, own=0)
    assert end.saved, "the others left with all that was done"
    end = joined({0: JobEnd({})}, ranks, {1: [2, 3]}, own=0)
    assert end.cause.text == "node 1 is gone" and end.cause.rank == 2
    raised = JobEnd({0: 1, 1: -9}, FirstFailure("raised", 0, 5, "x"))
    assert joined({0: raised}, ranks, {1: [2, 3]}, own=0).cause.text == "x"
