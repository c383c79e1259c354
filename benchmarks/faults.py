"""What becomes of `meshwright run --elastic` under each fault: three ranks on CPUs, over Gloo, or
two "nodes" of two ranks, which are two supervisors on this machine.

`python -m benchmarks.faults [WORDS]` has every fault whose name has one of the words, or all, and
prints a table: how each was detected and in how many seconds, the cause that was named, seconds
until it trained again, and whether its losses are those of a run without a fault.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.running import spare
from meshwright.running.nodes.meeting import MeetingPlace

STEPS, BATCH, RANKS = 12, 12, 3
AT = 6
"""The batch, counted from 0, before which ranks have their fault; every second step is saved."""
FAULT, WHERE = "FAULT_OF_RANKS", "FAULT_FOLDER"
LIMIT_S = 600.0
KILLS, STEPS_A_KILL, LONG_S, _BATCH_S = "FAULT_KILLS", 100, 3000.0, 0.01
"""A run of so many steps for each of the ranks that are killed in it, at random times. It goes no
further than the share of those that have been killed and the next one."""
_KILLED_SO_FAR = "killed-so-far"
NODES, NODE_RANKS = 2, 2
_PLACES = 2
"""Where nodes may meet: another one may lead."""
_CALM_S = 10.0
"""That the ranks have trained for when the fault comes: by then a supervisor has spares, and the
plan for less."""
_LAST_S = 0.02
"""After the batch was given out: within the step, mostly."""


class Net(nn.Module):
    """Small, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.a(x)))
        h = self.drop(torch.tanh(self.b(h))) + h
        return ((self.c(h) - y) ** 2).sum() / x.shape[0]


def model() -> Any:
    """A target of `meshwright`."""
    return Net().double(), _batch(0)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, and the fault that the environment asks for on this rank of this start."""
    start, rank = os.environ.get("MESHWRIGHT_STARTED", "0"), os.environ.get("RANK", "0")
    fault = FAULTS.get(os.environ.get(FAULT, ""))
    for number in range(10**6):
        x, y = _batch(number)
        time.sleep(_BATCH_S if KILLS in os.environ else 0.0)
        while _killed() < min(int(os.environ.get(KILLS, "0")), number // STEPS_A_KILL):
            time.sleep(_BATCH_S)
        if fault and number == AT and (int(start), int(rank)) in fault.places:
            happened = Path(os.environ[WHERE], "happened")
            if not happened.exists():
                time.sleep(_CALM_S * ("--hang" not in fault.more))
                happened.write_text(str(time.time()))
            fault.act(x)
        time.sleep(fault.pause_s if fault and start != "0" else 0.0)
        yield x, y


def _killed() -> int:
    """Ranks that have been killed; none where nobody counts them."""
    path = Path(os.environ.get(WHERE, ""), _KILLED_SO_FAR)
    return path.stat().st_size if path.is_file() else 0


# Faults: what a rank does to itself.


def _raise(x: Tensor) -> None:
    raise ArithmeticError("the seventh seal")


def _raise_in_step(x: Tensor) -> None:
    thread = ctypes.c_ulong(threading.get_ident())
    raising = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Timer(_LAST_S, raising, (thread, ctypes.py_object(ArithmeticError))).start()


def _raise_in_handler(x: Tensor) -> None:
    def handler(number: int, frame: object) -> None:
        raise ArithmeticError("in a handler")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, _LAST_S)


def _segfault(x: Tensor) -> None:
    ctypes.string_at(0)


def _hold_interpreter(x: Tensor) -> None:
    ctypes.PyDLL(None).sleep(1000)


def _signal(name: str) -> Callable[[Tensor], None]:
    return lambda x: os.kill(os.getpid(), signal.Signals[name])


def _hang(x: Tensor) -> None:
    time.sleep(1000)


def _leave(x: Tensor) -> None:
    os._exit(0)


def _abort_group(x: Tensor) -> None:
    dist.destroy_process_group()


def _nan(x: Tensor) -> None:
    x[3, 2] = float("nan")


def _kill_while_saving(x: Tensor) -> None:
    from meshwright.runtime.checkpoint import parts

    def half(boxes: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    parts.write = half  # type: ignore[assignment]


def _no_room(x: Tensor) -> None:
    from meshwright.runtime.checkpoint import parts

    def full(boxes: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    parts.write = full  # type: ignore[assignment]


def _damage(x: Tensor) -> None:
    """The newest checkpoint, and then this rank dies."""
    folder = Path(os.environ[WHERE]) / "saved"
    newest = folder / (folder / "latest").read_text().strip()
    content = bytearray((newest / "part-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "part-00000.safetensors").write_bytes(content)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_all(x: Tensor) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def _kill_node(x: Tensor) -> None:
    """All of its processes at once, as if its power were gone."""
    supervisor, own = psutil.Process(os.getppid()), os.getpid()
    for process in (supervisor, *supervisor.children()):
        if process.pid != own:
            process.kill()
    os.kill(own, signal.SIGKILL)


def _stop_node(x: Tensor) -> None:
    """Its supervisor alone: connections stay, and nobody answers."""
    os.kill(os.getppid(), signal.SIGSTOP)


def _end_node(x: Tensor) -> None:
    os.kill(os.getppid(), signal.SIGTERM)


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
class Fault:
    """One kind."""

    act: Callable[[Tensor], None]
    cause: str
    """Of the text that names the cause."""
    places: frozenset[tuple[int, int]] = frozenset({(0, 1)})
    """Start and rank."""
    code: int = 0
    """Of the run in the end."""
    more: tuple[str, ...] = ()
    """Options of `meshwright run`."""
    exact: bool = True
    """Whether steps have the losses of a run without a fault; all are taken if it ends with 0."""
    nodes: bool = False
    """Whether it is of a job on two nodes."""
    comes_back: bool = False
    """Whether the node that has gone is started again."""
    wakes: bool = False
    """Whether the node that was stopped goes on, once the other one trains."""
    pause_s: float = 0.0
    """Of each later batch, so that there is time for that."""


def _at(*places: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(places)


_KILLED = "rank 1 was killed by SIGKILL, in step 6"
_EVERYONE = _at(*((0, rank) for rank in range(RANKS)))
FAULTS: Mapping[str, Fault] = {
    "none": Fault(lambda x: None, ""),
    "exception": Fault(_raise, "rank 1, outside a step, after step 5: ArithmeticError: the"),
    "exception in the step": Fault(_raise_in_step, "ArithmeticError"),
    "exception in a handler": Fault(_raise_in_handler, "in a handler"),
    "the same exception twice": Fault(
        _raise, "the seventh seal", _at((0, 1), (1, 1)), code=70, exact=False),
    "abort": Fault(lambda x: os.abort(), "rank 1 was killed by SIGABRT, in step 6"),
    "segfault": Fault(_segfault, "rank 1 was killed by SIGSEGV, in step 6"),
    "killed": Fault(_signal("SIGKILL"), _KILLED),
    "killed rank 0": Fault(
        _signal("SIGKILL"), "rank 0 was killed by SIGKILL, in step 6", _at((0, 0))),
    "killed two": Fault(
        _signal("SIGKILL"), "(and rank 2 by SIGKILL)", _at((0, 1), (0, 2))),
    "killed twice": Fault(_signal("SIGKILL"), _KILLED, _at((0, 1), (1, 1))),
    "killed while saving": Fault(_kill_while_saving, "rank 1 was killed by SIGKILL, in step"),
    "killed, newest damaged": Fault(_damage, _KILLED),
    "killed all": Fault(_kill_all, "", code=137),
    "SIGTERM to a rank": Fault(_signal("SIGTERM"), ""),
    "SIGINT to a rank": Fault(_signal("SIGINT"), ""),
    "stopped": Fault(_signal("SIGSTOP"), "rank 1 died or was stopped, in step 6"),
    "interpreter held": Fault(_hold_interpreter, "rank 1 died or was stopped, in step 6"),
    "hang in a loader": Fault(
        _hang, "rank 1, outside a step, after step 5: no progress", more=("--hang", "5")),
    "left with 0": Fault(_leave, "rank 1 left with exit code 0, in step 6"),
    "group destroyed": Fault(_abort_group, "rank 1"),
    "disk full": Fault(_no_room, "No space left on device", code=4, exact=False),
    "NaN, stop": Fault(_nan, "step 6: the loss is nan", _EVERYONE, code=4, exact=False),
    "NaN, skip": Fault(
        _nan, "", _EVERYONE, more=("--on-nonfinite", "skip"), exact=False),
    "NaN, back": Fault(
        _nan, "", _EVERYONE, more=("--on-nonfinite", "back"), exact=False),
    "node killed": Fault(_kill_node, "node 1 is gone", _at((0, 2)), nodes=True),
    "leading node killed": Fault(_kill_node, "", _at((0, 0)), nodes=True),
    "node asked to end": Fault(_end_node, "", _at((0, 2)), nodes=True),
    "node killed, and back": Fault(
        _kill_node, "node 1 is gone", _at((0, 2)), nodes=True, comes_back=True, pause_s=2.5),
    "leading node stopped, and goes on": Fault(
        _stop_node, "node 0 leads no more", _at((0, 0)), nodes=True, wakes=True, pause_s=2.5),
}  # fmt: skip


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
    command = [sys.executable, "-m", "meshwright", "search", f"{__spec__.name}:model", "--json"]
    command += ["-c", cluster, "-b", str(BATCH), "--precision", "fp64"]
    command += ["--pin", f"dp_shard={ranks}", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def _environment(name: str, folder: str) -> dict[str, str]:
    return {**os.environ, FAULT: name, WHERE: folder, "MESHWRIGHT_CHECK": "0"}


def _command(plan: Path, folder: Path, steps: int, every: str, more: Sequence[str]) -> list[str]:
    module = __spec__.name
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
            command = _command(plan, folder, STEPS, "2", FAULTS[name].more)
            code = _on_nodes(command, FAULTS[name], folder, _environment(name, where))
            said = "".join(path.read_text() for path in sorted(folder.glob("said-*")))
            return _read(name, code, said, folder)
        own = _environment(name, where)
        command = _command(plan, folder, STEPS, "2", FAULTS[name].more)
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        code, said = done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stderr
        if FAULTS[name].act is _kill_all:
            at = command.index("-o") + 1
            again = [*command[:at], str(folder / "run2"), *command[at + 1 :]]
            subprocess.run(
                again, env=own | {FAULT: ""}, capture_output=True, timeout=LIMIT_S, check=False
            )
        return _read(name, code, said, folder)


def _read(name: str, code: int, said: str, folder: Path) -> Outcome:
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


def main() -> int:
    """0 if every fault ended as it should."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--kills", type=int, default=0, help="of random ranks, in one long run")
    asked = parser.parse_args()
    words = asked.words
    if asked.kills:
        with tempfile.TemporaryDirectory() as folder:
            wrong, starts = _killed_at_random(asked.kills, plan_file(Path(folder)))
        right = f"losses of all {STEPS_A_KILL * asked.kills} steps are those of a run without"
        if not wrong and starts <= asked.kills:
            wrong = f"the run was over after {starts - 1} kills of {asked.kills}"
        print(f"{max(starts - 1, 0)} kills, {starts} starts: {wrong or right}")
        return int(bool(wrong))
    names = [n for n in FAULTS if not words or n == "none" or any(w in n for w in words)]
    bad = 0
    print("| " + " | ".join(_HEADS) + " |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plans = {nodes: plan_file(Path(folder), nodes=nodes)
                 for nodes in {FAULTS[name].nodes for name in names}}  # fmt: skip
        wanted: Mapping[int, float] = {}
        for name in names:
            found = outcome(name, plans[FAULTS[name].nodes])
            wanted = wanted or found.losses
            wrong = found.wrong(wanted)
            bad += bool(wrong)
            print(_row(found, wrong), flush=True)
    return int(bad > 0)


def _killed_at_random(count: int, plan: Path) -> tuple[str, int]:
    """What is wrong with a run in which `count` times one of its ranks is killed, and how often its
    ranks were started."""
    chosen = random.Random(0)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        runs = {}
        for name in ("whole", "killed"):
            command = _command(
                plan, folder / name, STEPS_A_KILL * count, "50", ("--retry-lost", "1")
            )
            kills = str(count if name == "killed" else 0)
            process = subprocess.Popen(
                command, env=_environment("", where) | {KILLS: kills},
                stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            if name == "killed":
                _kill_ranks(process, folder / name, count, chosen)
            code = process.wait(LONG_S)
            runs[name] = _read("none", code, "", folder / name)
            if code:
                return f"{name}: exit code {code}, {runs[name].causes[-1:]}", 0
        return runs["killed"].wrong(runs["whole"].losses), len(runs["killed"].ranks)


def _kill_ranks(
    process: subprocess.Popen[bytes], folder: Path, count: int, chosen: random.Random
) -> None:
    """Each start trains for a random time, then loses a rank."""
    last = -1
    for _ in range(count):
        newest, trained = -1, -2
        while newest != trained or newest <= last:  # since it may have left, for a device to retry
            newest = _training(folder / "run")
            time.sleep(0.1 if newest <= last else chosen.uniform(0.0, 1.5))
            trained = _training(folder / "run")
            if process.poll() is not None:
                return
        ranks = [p for p in psutil.Process(process.pid).children() if _is_rank(p)]
        for rank in chosen.sample(ranks, min(len(ranks), 1)):
            rank.kill()
        last = newest
        with (folder.parent / _KILLED_SO_FAR).open("ab") as file:
            file.write(b"x")


def _training(output: Path) -> int:
    """The newest start if it has taken some steps, else -1."""
    newest = max((int(p.name.split("-")[1]) for p in output.glob("start-*")), default=0)
    log = output / f"start-{newest}/metrics.jsonl"
    return newest if log.exists() and log.read_text().count("\n") > 2 else -1


def _is_rank(process: psutil.Process) -> bool:
    """Started as one, or a spare that has become one: one that waits has a pipe for its input."""
    if "RANK" in process.environ():
        return True
    return spare.__name__ in process.cmdline() and (
        not os.readlink(f"/proc/{process.pid}/fd/0").startswith("pipe:")
    )


_HEADS = ("fault", "ranks", "detected, s", "trains again, s", "exit", "cause named", "right")


def _row(found: Outcome, wrong: str) -> str:
    seconds = [f"{s:.1f}" if s is not None else "" for s in (found.detected_s, found.again_s)]
    ranks = " → ".join(map(str, found.ranks))
    cells = (found.name, ranks, *seconds, found.code, "; ".join(found.causes), wrong or "yes")
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
