"""`meshwright run --elastic`: a job that goes on with what is left of its machines.

One process on each machine starts the ranks there and follows them, and one of these leads. If a
rank dies, hangs or is stopped, its device counts as lost, and if such a process goes, its machine:
a plan for the others is searched, and the job goes on from its newest checkpoint, in memory or on
disk, with the same global batch, schedule and random numbers. So its losses are those of a job that
never failed. A lost device is tried again after a while, and a machine that comes (back) is taken
at once: the job saves, and goes on with it.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from meshwright.arguments.targets import cluster_of, load_target
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.running.all_starts import steps_of_all
from meshwright.running.crew import Crew, JobStart, OwnMachine, RankStarter, stdout_of_ranks
from meshwright.running.memory_folder import NEIGHBOUR, OFF, check_memory_saves, memory_folder
from meshwright.running.memory_server import MemoryServer
from meshwright.running.nodes import lease as lease_file
from meshwright.running.nodes.crew_of_nodes import GIVE_UP_S, Follower, LeadingCrew, lead
from meshwright.running.nodes.lease import Lease, LeaseLost
from meshwright.running.nodes.meeting import meet
from meshwright.running.nodes.members import Membership
from meshwright.running.nodes.nodes_choice import NodesChoice
from meshwright.running.ranks import JobEnd, say_end
from meshwright.running.relief import Relief
from meshwright.running.replan import NewPlan, Replanner
from meshwright.running.slow_ranks import Standings
from meshwright.running.spares import Spares
from meshwright.running.verdict import judge
from meshwright.runtime.world import children
from meshwright.runtime.world.exit_codes import RETRY, STOP
from meshwright.runtime.world.failure import FirstFailure

JOURNAL = "elastic.jsonl"
"""In the run directory: one line a start, with its plan, and one for how it ended."""
_WAIT_S = 0.1


def check_elastic(plan: Plan, cluster: Cluster, nodes: NodesChoice | None = None) -> None:
    """PlanError for plans that a search alone would not find for other devices."""
    if nodes is None and cluster.num_nodes > 1:
        raise PlanError(
            f"{cluster.name} has {cluster.num_nodes} nodes: with --elastic start the same command "
            "on each of them, with --rdzv HOST:PORT, the place on one of them where they meet"
        )
    if nodes is not None:
        nodes.check(cluster)
    if plan.gives_up or plan.method is not None:
        given_up = plan.gives_up[0] if plan.gives_up else f"method {plan.method}"
        raise PlanError(
            f"--elastic needs a plan that trains as one process does, or another number of devices "
            f"trains differently; this one does not: {given_up}"
        )
    if plan.optimizer.startswith("tried "):
        raise PlanError(
            "--elastic: the plan's optimizer is your own, and a search knows only names"
        )


@dataclass
class Supervisor:
    """Starts a job's ranks again and again, until it is done or cannot go on."""

    replanner: Replanner
    output: Path
    crew: Crew
    retry_lost_s: float
    started: int = 0
    lost: dict[int, float] = field(default_factory=dict)
    """Device -> when it may be tried again."""
    times_lost: dict[int, int] = field(default_factory=dict)
    failures: list[FirstFailure] = field(default_factory=list)
    """Of starts in a row, oldest first, since one that left as it was asked to."""
    relief: Relief | None = None

    def run(self, asked: list[int]) -> int:
        """The exit code of the job; `asked` are the signals that have come, and come."""
        while not asked:
            if missing := self.crew.gather(asked):
                self.say(f"not started: {missing}")
                break
            self._take_back()
            began = time.monotonic()
            left_out = sorted(self.crew.absent().union(self.lost))
            try:
                found = self.replanner.plan_without(left_out)
            except MeshwrightError as error:
                if not left_out:
                    self.say(f"no plan: {error}")
                    return STOP
                self.say(f"no plan for what is left, waiting for a lost device: {error}")
                self._await_device(asked)
                continue
            if asked:  # while it searched
                break
            end = self._start(found, left_out, time.monotonic() - began, asked)
            self.started += 1
            say_end(end)
            if end.asked_by:
                return end.exit_code
            if end.cause is None and not end.saved:
                return end.exit_code
            if end.cause is None:
                self.failures.clear()  # it trained, and has saved what it did
            elif (code := self._judged(end)) is not None:
                return code
        return RETRY  # the newest checkpoint has what was done

    def _await_device(self, asked: Sequence[int]) -> None:
        """Returns when a lost device may be tried again, a node has come, or a signal."""
        at, away = min(self.lost.values(), default=float("inf")), self.crew.absent()
        while time.monotonic() < at and not asked and away <= self.crew.absent():
            time.sleep(_WAIT_S)

    def _start(
        self, found: NewPlan, left_out: Sequence[int], search_s: float, asked: list[int]
    ) -> JobEnd:
        plan = found.plan
        left = [r for r in range(self.replanner.cluster.num_devices) if r not in left_out]
        slots = [r for i, r in enumerate(left) if i not in found.resting]
        failures = tuple(failure.dumps() for failure in self.failures)
        start = JobStart(self.started, plan_io.dumps(plan), tuple(slots), failures)
        dropped = self.replanner.dropped(plan)
        self._note("start", plan=plan.hash, ranks=plan.world_size, devices=slots,
                   search_s=search_s, dropped=dropped)  # fmt: skip
        without_pins = f", without {', '.join(map(repr, dropped))}, which cannot hold there"
        self.say(f"start {self.started}: {plan.world_size} ranks, plan {plan.hash[:12]} "
                  f"(found in {seconds(search_s)})" + without_pins * bool(dropped))  # fmt: skip
        self.relief = Relief(self.replanner, found, tuple(left_out), slots, self._slow)
        end = self.crew.run(
            start, lambda: self.replanner.search_ahead(left_out), self._may_do_better, asked
        )
        gone = self.crew.absent()
        lost = [slots[rank] for rank in end.lost if slots[rank] not in gone]
        self._note(
            "end", codes=[end.codes[rank] for rank in sorted(end.codes)],
            cause=end.cause.text if end.cause else "", kind=end.cause.kind if end.cause else "",
            step=end.cause.step if end.cause else None, detected_s=end.detected_s,
            lost=lost, gone=sorted(gone.difference(left_out)),
        )  # fmt: skip
        self._lose(lost)
        if end.cause is not None and end.cause.kind == "gone":
            self._lose(gone.difference(left_out), free=1)
        return end

    def _may_do_better(self, standings: Standings) -> bool:
        """Whether there is more than the ranks use, a device that may be tried again or a machine,
        or a better plan for slow ones among them."""
        now = time.monotonic()
        free = {device for device, at in self.lost.items() if at < now}
        if not free <= self.crew.absent() or self.crew.has_more(self.lost):
            return True
        return self.relief is not None and self.relief.is_found(standings)

    def _slow(self, rank: int, device: int, factor: float) -> None:
        """Names a slow rank."""
        what = f"takes {factor:g} times as long as" if factor > 1 else "is now as fast as"
        self._note("slow", rank=rank, device=device, factor=factor)
        self.say(f"rank {rank} (device {device}) {what} ranks that do the same")

    def _judged(self, end: JobEnd) -> int | None:
        """The exit code if the job is not started again."""
        assert end.cause is not None
        verdict = judge(end, self.failures)
        self.failures.append(end.cause)
        if verdict.again:
            return None
        self.say(f"not started again: {verdict.why}")
        return verdict.exit_code

    def _lose(self, devices: Iterable[int], free: int = 0) -> None:
        """Devices that are lost again and again wait longer each time. The first `free` times they
        do not: those of a node that has gone are taken back when it comes, but not time and again,
        or a node that fails soon after each start would keep all others from training."""
        for device in devices:
            count = self.times_lost.get(device, 0)
            self.times_lost[device] = count + 1
            if count >= free:
                wait_s = self.retry_lost_s * 2 ** (count - free)
                self.lost[device] = time.monotonic() + wait_s

    def _take_back(self) -> None:
        now = time.monotonic()
        self.lost = {device: at for device, at in self.lost.items() if at > now}

    def _note(self, what: str, **more: object) -> None:
        line = {"what": what, "number": self.started, "time": time.time(), **more}
        with (self.output / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        """To people."""
        print(f"meshwright: {text}", file=sys.stderr, flush=True)


def run_elastic(
    plan_file: Path,
    target: str,
    arguments: Sequence[str],
    *,
    output: Path | None,
    cluster: str | None,
    retry_lost_s: float,
    as_json: bool = False,
    nodes: NodesChoice | None = None,
    save: Path | None = None,
    memory_saves: str = NEIGHBOUR,
) -> int:
    """Runs a job that survives the loss of devices; its exit code. On a machine that is one of
    several, with `nodes`, and `save`, the folder of checkpoints. `memory_saves` is one of
    `memory_folder.MEMORY_SAVES`.

    `arguments` are those of `meshwright run` for the ranks, without plan and run directory.
    """
    began, plan = time.time(), plan_io.load(plan_file)
    machines = cluster_of(plan, cluster)
    check_elastic(plan, machines, nodes)
    check_memory_saves(memory_saves)
    output = output or Path("runs") / plan.hash[:12]
    output.mkdir(parents=True, exist_ok=True)
    replanner = Replanner(plan, machines, load_target(target, meta=True))
    own = machines.nodes[max(0, nodes.node if nodes is not None else 0)]
    with (
        memory_folder() if memory_saves != OFF else nullcontext() as memory,
        children.ending_signals() as asked,
        Spares(len(own.devices), stdout_of_ranks(as_json)) as spares,
        ExitStack() as stack,
    ):
        lease = None if save is None or nodes is None else Lease(save / lease_file.NAME)
        starter = RankStarter(
            machines, output, arguments, memory,
            None if memory is None or lease is None else stack.enter_context(MemoryServer(memory)),
            memory_saves == NEIGHBOUR, as_json, spares, None if lease is None else lease.path,
        )  # fmt: skip
        supervisor = Supervisor(replanner, output, OwnMachine(starter), retry_lost_s)
        try:
            if nodes is None or lease is None:
                return supervisor.run(asked)
            lease.watch()
            job = f"{plan.hash[:16]} {target}"
            return take_part(supervisor, starter, lease, nodes, job, asked)
        finally:
            if lease is not None:
                lease.close()
            replanner.close()
            for step in steps_of_all(output, supervisor.started, began) if as_json else ():
                print(json.dumps(asdict(step)))


def take_part(
    supervisor: Supervisor, starter: RankStarter, lease: Lease, nodes: NodesChoice, job: str,
    asked: list[int],
) -> int:  # fmt: skip
    """Leads the nodes of a job, or follows whoever does, until the job is over; its exit code."""
    node, gone, silent = nodes.node, None, False
    started, failures = 0, tuple[str, ...]()  # what those who led before have told
    expected = set(range(starter.cluster.num_nodes))
    while meeting := meet(
        nodes.places, job, GIVE_UP_S, gone=gone, silent=silent, asked=asked
    ):  # fmt: skip
        gone, silent = None, False
        if meeting.leads:
            supervisor.started = started
            supervisor.failures = [FirstFailure.loads(text) for text in failures]
            least = nodes.least_of(starter.cluster.num_nodes)
            node = max(node, 0)
            crew = lead(meeting, starter, lease, least, node, expected, started)
            del meeting
            try:
                return _lead(supervisor, crew, asked)
            except LeaseLost as lost:
                supervisor.say(f"node {node} leads no more: {lost}")
                started = supervisor.started + 1  # the one under way has its folder
                failures = tuple(failure.dumps() for failure in supervisor.failures)
                supervisor.crew = OwnMachine(starter)
                del crew, lost  # and with it the store that others would find
                continue
        try:
            mine = starter.memory_at(node, meeting.place.this_machine())
            membership = Membership.join(meeting.store, node, meeting.cut, mine)
        except dist.DistError:
            gone = meeting.place
            continue
        follower = Follower(starter, meeting, membership, started, failures, node)
        if any(place.is_here() for place in nodes.places):  # it may have to lead
            follower.ahead = supervisor.replanner.search_ahead
        try:
            if (over := follower.run(asked)) is not None:
                return over
        except dist.DistError:
            gone = meeting.place
        finally:
            membership.leave()
        silent = membership.silent
        started, failures, node = follower.started, follower.failures, follower.node
        expected = follower.others or expected
    if not asked:
        places = ", ".join(map(str, nodes.places))
        supervisor.say(f"nobody leads the nodes: no answer at {places} for {GIVE_UP_S:g} s")
    return RETRY


def _lead(supervisor: Supervisor, crew: LeadingCrew, asked: list[int]) -> int:
    """The exit code of the job; LeaseLost if another node leads by now."""
    supervisor.crew = crew
    try:
        code = supervisor.run(asked)
        if not (asked and code):  # else this node leaves, and another one may lead
            crew.end(code)
    finally:
        crew.members.close()
    return code
