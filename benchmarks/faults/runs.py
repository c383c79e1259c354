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
from math import isclose
from pathlib import Path

from benchmarks.faults import target
from benchmarks.faults.acts import FAULTS, RANKS, WHERE, Fault
from benchmarks.faults.target import BATCH, FAULT
from meshwright.ir.cluster.cluster import Cluster
from meshwright.running.nodes.meeting import MeetingPlace

STEPS = 12
LIMIT_S = 600.0
NODES, NODE_RANKS = 2, 2
_PLACES = 2
"""Where nodes may meet: another one may lead."""
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
        return ""


def cluster_file(folder: Path) -> Path:
    """The two nodes."""
    path, own = folder / "nodes.yaml", Cluster.local(NODE_RANKS)
    link = own.nodes[0].link
    replace(own, name="two nodes", nodes=own.nodes * NODES, between_nodes=link).save(path)
    return path


def plan_file(folder: Path, *, nodes: bool = False) -> Path:
    """Searches the plan of all runs on one machine, or of those on two nodes."""
    path = folder / f"plan-{nodes:d}.json"
    cluster, ranks = f"local:{RANKS}", RANKS
    if nodes:
        cluster, ranks = str(cluster_file(folder)), NODES * NODE_RANKS
    command = [sys.executable, "-m", "meshwright", "search", f"{target.__name__}:model", "--json"]
    command += ["-c", cluster, "-b", str(BATCH), "--precision", "fp64"]
    command += ["--pin", f"dp_shard={ranks}", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def environment(name: str, folder: str) -> dict[str, str]:
    return {**os.environ, FAULT: name, WHERE: folder, "MESHWRIGHT_CHECK": "0"}


def command_of(plan: Path, folder: Path, steps: int, every: str, more: Sequence[str]) -> list[str]:
    module = target.__name__
    command = [sys.executable, "-m", "meshwright", "run", str(plan), f"{module}:model"]
    command += ["--data", f"{module}:data", "--steps", str(steps), "-o", str(folder / "run")]
    command += ["--save", str(folder / "saved"), "--save-every", every, "--keep", "3"]
    return [*command, "--elastic", "--no-trace", "--resume", *more]


def _on_nodes(command: Sequence[str], fault: Fault, folder: Path, own: Mapping[str, str]) -> int:
    """The exit code of the first node, or of another one if that was killed; what they say is in
    files."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(_PLACES)]
    places = [MeetingPlace("127.0.0.1", one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    more = ("--cluster", str(cluster_file(folder)), "--rdzv", ",".join(map(str, places)),
            "--nodes", f"1:{NODES}")  # fmt: skip
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

    nodes = [node(number) for number in range(NODES)]
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
        folder = Path(where)
        if FAULTS[name].nodes:
            command = command_of(plan, folder, STEPS, "2", FAULTS[name].more)
            code = _on_nodes(command, FAULTS[name], folder, environment(name, where))
            said = "".join(path.read_text() for path in sorted(folder.glob("said-*")))
            return read(name, code, said, folder)
        own = environment(name, where)
        command = command_of(plan, folder, STEPS, "2", FAULTS[name].more)
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        code, said = done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stderr
        if FAULTS[name].runs_again:
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
    losses, again = {}, None
    for path in sorted(folder.glob("run*/start-*/metrics.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            losses[row["step"]] = row["loss_metrics/global_avg_loss"]
            later = at is not None and row["time"] > at and path.parent.name != "start-0"
            if later and again is None:
                again = row["time"] - (at or 0.0)
    ends = [line for line in journal if line["what"] == "end"]
    detected = [line["time"] - at for line in ends if at is not None and line["time"] > at]
    return Outcome(
        name, code, tuple(line["cause"] for line in ends if line["cause"]),
        detected[0] if detected and ends[0]["cause"] else None, again, losses,
        tuple(line["ranks"] for line in journal if line["what"] == "start"), said,
    )  # fmt: skip
