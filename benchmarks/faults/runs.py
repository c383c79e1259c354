"""One run with a fault, and what was seen of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from statistics import median

from benchmarks.faults import target
from benchmarks.faults.acts import FAULTS, RANKS, WHERE, Fault
from benchmarks.faults.target import BATCH, FAULT, WIDE_BATCH
from meshwright.ir.cluster.cluster import Cluster
from meshwright.running.nodes.meeting import MeetingPlace

LIMIT_S = 600.0
NODE_RANKS = {2: 2, 3: 1}
"""Of each node, by how many there are."""
_FEW = 3
"""Steps, of which no median is told."""
_PLACES = 2
"""Where nodes may meet: another one may lead."""
_LOOKS = """
import runpy
from meshwright.running import slow_ranks

slow_ranks.LOOK_S = 1.0
runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
"""
"""A supervisor that looks for slow ranks each second, in place of each tenth one."""
_NODE = """
import runpy, sys, time
from meshwright.running import elastic
from meshwright.running.nodes.meeting import parse_places

own, (first, *_) = sys.argv.pop(1), parse_places(sys.argv[sys.argv.index("--rdzv") + 1])
while own != "0" and not first.answers():
    time.sleep(0.05)
runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
"""
"""A node's process: the first one leads, and the others come at once, however slow the machine."""


@dataclass(frozen=True)
class Outcome:
    """Of a run with a fault."""

    name: str
    code: int
    causes: tuple[str, ...]
    detected_s: float | None
    """From the fault until the ranks had ended."""
    again_s: float | None
    """From the fault until a step was taken after it."""
    losses: Mapping[int, float]
    ranks: tuple[int, ...]
    """Of each start."""
    said: str
    again_at: int = 0
    """The first step that was taken after it."""
    step_s: tuple[float, ...] = ()
    """Medians of each start."""

    def wrong(self, wanted: Mapping[int, float]) -> str:
        """What is not as it should be; nothing if all is."""
        fault = FAULTS[self.name]
        if self.code != fault.code:
            return f"exit code {self.code}, not {fault.code}"
        if fault.cause not in " ".join((*self.causes, self.said)):
            return f"{fault.cause!r} is not named"
        if (fault.exact or not fault.code) and self.losses.keys() != wanted.keys():
            return f"steps {sorted(self.losses)}"
        if fault.exact:
            off = [s for s, x in wanted.items() if not isclose(x, self.losses[s], rel_tol=1e-10)]
            if off:
                return f"losses of steps {off} differ"
        if fault.in_memory and self.again_at <= 1:
            return "it began anew: the newest state was nowhere"
        if fault.relieved and not (len(self.step_s) > 1 and self.step_s[-1] < self.step_s[0]):
            return f"steps took {self.step_s} s"
        return ""


def cluster_file(folder: Path, nodes: int) -> Path:
    """So many nodes."""
    path, own = folder / f"nodes-{nodes}.yaml", Cluster.local(NODE_RANKS[nodes])
    link = own.nodes[0].link
    replace(own, name=f"{nodes} nodes", nodes=own.nodes * nodes, between_nodes=link).save(path)
    return path


def plan_file(folder: Path, *, nodes: int = 0, wide: bool = False) -> Path:
    """Searches the plan of all runs on one machine, or of those on so many nodes."""
    path = folder / f"plan-{nodes}-{wide:d}.json"
    cluster, ranks = f"local:{RANKS}", RANKS
    if nodes:
        cluster, ranks = str(cluster_file(folder, nodes)), nodes * NODE_RANKS[nodes]
    command = [sys.executable, "-m", "meshwright", "search", _target(wide), "--json"]
    batch = WIDE_BATCH if wide else BATCH
    command += ["-c", cluster, "-b", str(batch), "--precision", "fp64"]
    command += ["--pin", f"dp_shard={ranks}", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def _target(wide: bool) -> str:
    return f"{target.__name__}:{'wide_' * wide}model"


def environment(name: str, folder: str) -> dict[str, str]:
    return {**os.environ, FAULT: name, WHERE: folder, "MESHWRIGHT_CHECK": "0"}


def command_of(
    plan: Path, folder: Path, steps: int, every: int, more: Sequence[str], wide: bool = False
) -> list[str]:
    command = [sys.executable, "-c", _LOOKS, "run", str(plan), _target(wide)]
    command += ["--data", f"{target.__name__}:data", "--steps", str(steps)]
    command += ["-o", str(folder / "run")]
    command += ["--save", str(folder / "saved"), "--save-every", str(every), "--keep", "3"]
    return [*command, "--elastic", "--no-trace", "--resume", *more]


def _on_nodes(command: Sequence[str], fault: Fault, folder: Path, own: Mapping[str, str]) -> int:
    """The exit code of the first node, or of another one if that was killed; what they say is in
    files."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(_PLACES)]
    places = [MeetingPlace("127.0.0.1", one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    count = fault.nodes
    more = ("--cluster", str(cluster_file(folder, count)), "--rdzv", ",".join(map(str, places)),
            "--nodes", f"1:{count}")  # fmt: skip
    until = time.monotonic() + LIMIT_S

    def node(number: int) -> subprocess.Popen[bytes]:
        with (folder / f"said-{number}").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-c", _NODE, str(number), *command[3:], *more, "--node",
                 str(number)], env=own, stderr=said, stdout=said,
            )  # fmt: skip

    def wait(event: Callable[[], bool]) -> None:
        while not event() and time.monotonic() < until:
            time.sleep(0.1)

    nodes = [node(number) for number in range(count)]
    if fault.comes_back:
        wait(lambda: nodes[1].poll() is not None)
        wait(lambda: (folder / "run/start-1/metrics.jsonl").exists())
        nodes[1] = node(1)
    if fault.wakes:
        wait(lambda: (folder / "run/start-1/metrics.jsonl").exists())
        nodes[0].send_signal(signal.SIGCONT)
    codes = [one.wait(max(1.0, until - time.monotonic())) for one in nodes]
    return next((code for code in codes if code >= 0), 128 - codes[0])


def outcome(name: str, plan: Path) -> Outcome:
    """Runs with the fault of that name; again, if all of it was killed."""
    with tempfile.TemporaryDirectory() as where:
        folder, fault = Path(where), FAULTS[name]
        command = command_of(plan, folder, fault.steps, fault.saves_every, fault.more, fault.wide)
        if fault.nodes:
            code = _on_nodes(command, fault, folder, environment(name, where))
            said = "".join(path.read_text() for path in sorted(folder.glob("said-*")))
            return read(name, code, said, folder)
        own = environment(name, where)
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        code, said = done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stderr
        if fault.runs_again:
            at = command.index("-o") + 1
            again = [*command[:at], str(folder / "run2"), *command[at + 1 :]]
            subprocess.run(
                again, env=own | {FAULT: ""}, capture_output=True, timeout=LIMIT_S, check=False
            )
        return read(name, code, said, folder)


def read(name: str, code: int, said: str, folder: Path) -> Outcome:
    happened = folder / "happened"
    at = float(happened.read_text()) if happened.exists() else None
    journal = [
        json.loads(line)
        for path in sorted(folder.glob("run*/elastic.jsonl"))
        for line in path.read_text().splitlines()
    ]
    losses, again, again_at, step_s = {}, None, 0, []
    for path in sorted(folder.glob("run*/start-*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if len(rows) > _FEW:
            step_s.append(median(b["time"] - a["time"] for a, b in pairwise(rows)))
        for row in rows:
            losses[row["step"]] = row["loss_metrics/global_avg_loss"]
            later = at is not None and row["time"] > at and path.parent.name != "start-0"
            if later and again is None:
                again, again_at = row["time"] - (at or 0.0), row["step"]
    ends = [line for line in journal if line["what"] == "end"]
    detected = [line["time"] - at for line in ends if at is not None and line["time"] > at]
    return Outcome(
        name, code, tuple(line["cause"] for line in ends if line["cause"]),
        detected[0] if detected and ends[0]["cause"] else None, again, losses,
        tuple(line["ranks"] for line in journal if line["what"] == "start"), said, again_at,
        tuple(step_s),
    )  # fmt: skip
