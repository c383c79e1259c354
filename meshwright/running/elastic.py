"""`meshwright run --elastic`: a job that goes on with what is left of its machine.

One process starts the ranks and follows them. If one dies, hangs or is stopped, its device counts
as lost: a plan for the others is searched, and the job goes on from its newest checkpoint, in
memory or on disk, with the same global batch, schedule and random numbers. So its losses are those
of a job that never failed. A lost device is tried again after a while: the job saves, and goes on
with it.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.arguments.targets import cluster_of, load_target
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.running.all_starts import start_folder, steps_of_all
from meshwright.running.memory_folder import memory_folder
from meshwright.running.ranks import JobEnd, Ranks, say_end
from meshwright.running.replan import NewPlan, Replanner
from meshwright.running.verdict import judge
from meshwright.runtime.job import memory_saves
from meshwright.runtime.world import children, launcher
from meshwright.runtime.world.exit_codes import RETRY, STOP
from meshwright.runtime.world.failure import FirstFailure

JOURNAL = "elastic.jsonl"
"""In the run directory: one line a start, with its plan, and one for how it ended."""
_WAIT_S = 0.1


def check_elastic(plan: Plan, cluster: Cluster) -> None:
    """PlanError for plans that a search alone would not find for other devices."""
    if cluster.num_nodes > 1:
        raise PlanError(
            f"--elastic runs on one machine, and {cluster.name} has {cluster.num_nodes} nodes: "
            "start the job under a launcher for several, such as torchrun --max-restarts, with "
            "--save and --resume"
        )
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
    arguments: Sequence[str]
    """Of `meshwright run PLAN`, after the plan."""
    retry_lost_s: float
    memory: Path | None = None
    """A folder for the newest state, in memory."""
    as_json: bool = False
    """What ranks print goes to stderr: stdout has the steps of all starts, at the end."""
    started: int = 0
    lost: dict[int, float] = field(default_factory=dict)
    """Device -> when it may be tried again."""
    times_lost: dict[int, int] = field(default_factory=dict)
    failures: list[FirstFailure] = field(default_factory=list)

    def run(self, asked: list[int]) -> int:
        """The exit code of the job; `asked` are the signals that have come, and come."""
        while not asked:
            self._take_back()
            began = time.monotonic()
            try:
                found = self.replanner.plan_without(sorted(self.lost))
            except MeshwrightError as error:
                if not self.lost:
                    self._say(f"no plan: {error}")
                    return STOP
                self._say(f"no plan for what is left, waiting for a lost device: {error}")
                self._await_device(asked)
                continue
            if asked:  # while it searched
                break
            end = self._start(found, time.monotonic() - began, asked)
            self.started += 1
            say_end(end)
            if end.asked_by:
                return end.exit_code
            if end.cause is None and not end.saved:
                return end.exit_code
            if end.cause is not None and (code := self._judged(end)) is not None:
                return code
        return RETRY  # the newest checkpoint has what was done

    def _await_device(self, asked: Sequence[int]) -> None:
        """Returns when the first lost device may be tried again, or a signal has come."""
        at = min(self.lost.values())
        while time.monotonic() < at and not asked:
            time.sleep(_WAIT_S)

    def _start(self, found: NewPlan, search_s: float, asked: list[int]) -> JobEnd:
        plan = found.plan
        folder = start_folder(self.output, self.started)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "plan.json"
        plan_io.save(plan, path)
        left = [r for r in range(self.replanner.cluster.num_devices) if r not in self.lost]
        slots = [r for i, r in enumerate(left) if i not in found.resting]
        arguments = ("-m", "meshwright", "run", str(path), *self.arguments, "-o", str(folder))
        dropped = self.replanner.dropped(plan)
        self._note("start", plan=plan.hash, ranks=plan.world_size, devices=slots,
                   search_s=search_s, dropped=dropped)  # fmt: skip
        without_pins = f", without {', '.join(map(repr, dropped))}, which cannot hold there"
        self._say(f"start {self.started}: {plan.world_size} ranks, plan {plan.hash[:12]} "
                  f"(found in {seconds(search_s)})" + without_pins * bool(dropped))  # fmt: skip
        shown = _visible(slots) if plan.cluster.device_kind == "cuda" else {}
        if self.memory is not None:
            shown[memory_saves.FOLDER] = str(self.memory)
        # Each start has a store of its own: what earlier ranks wrote in theirs would mislead these.
        store = launcher.open_store()
        with Ranks(plan.world_size, arguments, store, self.started, shown, asked,
                   stdout=sys.stderr.fileno() if self.as_json else None) as ranks:  # fmt: skip
            self.replanner.search_ahead(sorted(self.lost))
            again_at = min(self.lost.values(), default=float("inf"))
            end = ranks.wait(max(0.0, again_at - time.monotonic()))
        self._note(
            "end", codes=[end.codes[rank] for rank in sorted(end.codes)],
            cause=end.cause.text if end.cause else "", kind=end.cause.kind if end.cause else "",
            step=end.cause.step if end.cause else None, detected_s=end.detected_s,
            lost=[slots[rank] for rank in end.lost],
        )  # fmt: skip
        if end.lost:
            self._lose([slots[rank] for rank in end.lost])
        return end

    def _judged(self, end: JobEnd) -> int | None:
        """The exit code if the job is not started again."""
        assert end.cause is not None
        verdict = judge(end, self.failures)
        self.failures.append(end.cause)
        if verdict.again:
            return None
        self._say(f"not started again: {verdict.why}")
        return verdict.exit_code

    def _lose(self, devices: Sequence[int]) -> None:
        """Devices that are lost again and again wait longer each time."""
        for device in devices:
            count = self.times_lost.get(device, 0)
            self.times_lost[device] = count + 1
            self.lost[device] = time.monotonic() + self.retry_lost_s * 2**count

    def _take_back(self) -> None:
        now = time.monotonic()
        self.lost = {device: at for device, at in self.lost.items() if at > now}

    def _note(self, what: str, **more: object) -> None:
        line = {"what": what, "number": self.started, "time": time.time(), **more}
        with (self.output / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _say(self, text: str) -> None:
        print(f"meshwright: {text}", file=sys.stderr, flush=True)


def _visible(slots: Sequence[int]) -> dict[str, str]:
    """GPUs that ranks are to see: of those that this process sees, the ones that are left."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [known[slot] if slot < len(known) and known[slot] else str(slot) for slot in slots]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def run_elastic(
    plan_file: Path,
    target: str,
    arguments: Sequence[str],
    *,
    output: Path | None,
    cluster: str | None,
    retry_lost_s: float,
    as_json: bool = False,
) -> int:
    """Runs a job that survives the loss of devices; its exit code.

    `arguments` are those of `meshwright run` for the ranks, without plan and run directory.
    """
    began, plan = time.time(), plan_io.load(plan_file)
    machines = cluster_of(plan, cluster)
    check_elastic(plan, machines)
    output = output or Path("runs") / plan.hash[:12]
    output.mkdir(parents=True, exist_ok=True)
    replanner = Replanner(plan, machines, load_target(target, meta=True))
    with memory_folder() as memory, children.ending_signals() as asked:
        supervisor = Supervisor(replanner, output, arguments, retry_lost_s, memory, as_json)
        try:
            return supervisor.run(asked)
        finally:
            replanner.close()
            for step in steps_of_all(output, supervisor.started, began) if as_json else ():
                print(json.dumps(asdict(step)))
