"""A long run in which ranks are killed at random times."""

import os
import random
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.faults.runs import command_of, environment, read
from benchmarks.faults.target import KILLED_SO_FAR, KILLS, STEPS_A_KILL
from meshwright.running import spare

_LONG_S = 3000.0


def killed_at_random(count: int, plan: Path) -> tuple[str, int, int]:
    """What is wrong with a run in which `count` times one of its ranks is killed, how many were,
    and how often ranks were started: also anew, with one that may be tried again."""
    chosen = random.Random(0)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        runs = {}
        for name in ("whole", "killed"):
            command = command_of(
                plan, folder / name, STEPS_A_KILL * count, 50, ("--retry-lost", "1")
            )
            kills = str(count if name == "killed" else 0)
            process = subprocess.Popen(
                command, env=environment("", where) | {KILLS: kills},
                stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            if name == "killed":
                _kill_ranks(process, folder / name, count, chosen)
            code = process.wait(_LONG_S)
            runs[name] = read("none", code, "", folder / name)
            if code:
                starts = len(runs[name].ranks)
                return f"{name}: exit code {code}, {runs[name].causes[-3:]}", starts - 1, starts
        killed = (folder / KILLED_SO_FAR).stat().st_size
        return runs["killed"].wrong(runs["whole"].losses), killed, len(runs["killed"].ranks)


def _kill_ranks(
    process: subprocess.Popen[bytes], folder: Path, count: int, chosen: random.Random
) -> None:
    """Each start trains for a random time, then loses a rank that trained."""
    last, killed = -1, 0
    while killed < count and process.poll() is None:
        newest = _training(folder / "run")
        ranks = [p for p in psutil.Process(process.pid).children() if _is_rank(p)]
        time.sleep(0.1 if newest <= last else chosen.uniform(0.0, 1.5))
        # It may have left since, for a device to retry: ranks of the next start are others.
        if newest <= last or newest != _training(folder / "run") or not ranks:
            continue
        rank = chosen.choice(ranks)
        if not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE:
            continue
        rank.kill()
        last, killed = newest, killed + 1
        with (folder.parent / KILLED_SO_FAR).open("ab") as file:
            file.write(b"x")


def _training(output: Path) -> int:
    """The newest start if it has taken some steps, else -1."""
    newest = max((int(p.name.split("-")[1]) for p in output.glob("start-*")), default=0)
    log = output / f"start-{newest}/metrics.jsonl"
    return newest if log.exists() and log.read_text().count("\n") > 2 else -1


def _is_rank(process: psutil.Process) -> bool:
    """Started as one, or a spare that has become one: one that waits has a pipe for its input."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended
        if "RANK" in process.environ():
            return True
        return spare.__name__ in process.cmdline() and (
            not os.readlink(f"/proc/{process.pid}/fd/0").startswith("pipe:")
        )
    return False
