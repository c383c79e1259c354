"""What a command starts does not outlive it, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from meshwright.testing.spawn import alone

ROOT = Path(__file__).parents[3]
# Stands for `meshwright run`: it starts a launcher, which starts ranks in sessions of their own.
PARENT = """
import sys
from meshwright.runtime.world import children
raise SystemExit(children.run([sys.executable, "-c", *sys.argv[1:]], grace_s=1.0))
"""
LAUNCHER = """
import os, signal, subprocess, sys, time
rank = [sys.executable, "-c", sys.argv[1], sys.argv[3]]
ranks = [subprocess.Popen(rank, start_new_session=True) for _ in range(2)]
def end(number, frame):
    for rank in ranks:
        rank.send_signal(number)
    raise SystemExit(1)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
exec(sys.argv[2])
"""
RANK = """
import pathlib, sys, time
from meshwright.runtime.world import children
children.die_with_parent()
pathlib.Path(sys.argv[1]).open("a").write("x")
time.sleep(100)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RANK
WAIT = "time.sleep(100)"


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Under nohup children inherit that SIGHUP is nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def family(tmp_path: Path, launcher: str = WAIT, rank: str = RANK):
    """A parent whose ranks run, and all processes of it."""
    started = tmp_path / "started"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, LAUNCHER, rank, launcher, str(started)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: started.exists() and started.stat().st_size == 2)
    return process, psutil.Process(process.pid).children(recursive=True)


def wait_for(condition, limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def gone(processes) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGKILL", -9)]
)
def test_no_process_outlives_the_parent(tmp_path: Path, name: str, code: int) -> None:
    parent, processes = family(tmp_path)
    assert len(processes) == 3
    parent.send_signal(getattr(signal, name))
    assert parent.wait(10) == code
    wait_for(lambda: gone(processes))


def test_what_ignores_a_signal_is_killed(tmp_path: Path) -> None:
    parent, processes = family(tmp_path, "signal.signal(15, signal.SIG_IGN); " + WAIT, STUBBORN)
    parent.terminate()
    assert parent.wait(10) == 143 and gone(processes)


def test_ranks_go_with_a_killed_launcher(tmp_path: Path) -> None:
    parent, processes = family(tmp_path, rank=STUBBORN)
    next(p for p in processes if p.children()).kill()
    assert parent.wait(10) == 137 and gone(processes)


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 6)", 134)])
def test_a_launcher_that_ends_leaves_nothing(tmp_path: Path, ends: str, code: int) -> None:
    wait = f"""
while not (os.path.exists(sys.argv[3]) and os.path.getsize(sys.argv[3]) == 2): time.sleep(.01)
time.sleep(.5)
{ends}"""
    parent, processes = family(tmp_path, wait)
    assert parent.wait(10) == code and gone(processes)


def _leave(how: str) -> tuple[str, int, bool]:
    from meshwright.runtime.world import leaving

    told = []
    with leaving.leaving(told.append, lambda: None) as asked:
        os.kill(os.getpid(), signal.Signals[how])
        for _ in range(100):
            time.sleep(0.001)
    default = signal.getsignal(signal.Signals[how]) in (signal.SIG_DFL, signal.default_int_handler)
    return told[0], asked.exit_code, default


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_is_noted_for_the_loop(name: str, code: int) -> None:
    assert alone(_leave, name) == (name, code, True)


def _warned() -> int:
    from meshwright.runtime.world import leaving

    leaving.warnings_change_nothing()
    with leaving.leaving(lambda _: None, lambda: None) as asked:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(100):
            time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)  # the last step is done
    time.sleep(0.001)
    return asked.exit_code


def test_a_warning_that_comes_too_late_changes_nothing() -> None:
    assert alone(_warned) == 128 + signal.SIGUSR1


def test_beside_the_main_thread_signals_stay_as_they_are() -> None:
    from meshwright.runtime.world import leaving

    found, before = [], signal.getsignal(signal.SIGTERM)

    def train() -> None:  # as frameworks do that run it on a thread of their own
        with leaving.leaving(found.append, lambda: None) as asked:
            found.extend((asked.by, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [None, before]


def test_a_rank_that_is_stuck_leaves_in_the_end(tmp_path: Path) -> None:
    last = tmp_path / "last"
    script = f"""
import pathlib, os, signal, sys, threading
from meshwright.runtime.world import leaving
leaving.LEAVE_S = 0.2
stuck = threading.Lock()
stuck.acquire()
with leaving.leaving(sys.stderr.write, lambda: pathlib.Path({str(last)!r}).write_text("written")):
    signal.pthread_sigmask(signal.SIG_BLOCK, {{15}})  # other threads get it, and no handler runs
    threading.Timer(0.1, lambda: os.kill(os.getpid(), 15)).start()
    stuck.acquire()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=20, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 143 and done.stderr.startswith("SIGTERM"), done.stderr
    assert last.read_text() == "written" and "a step is not over after 0.2 s" in done.stderr


def test_what_this_process_forks_to_compute_something_is_no_orphan() -> None:
    """As `explore_apart` does, which would take it for a crash."""
    from meshwright.runtime.world import children

    ours = children.children_now()
    own = multiprocessing.get_context("fork").Process(target=signal.pause)
    own.start()
    orphan = subprocess.Popen([sys.executable, "-c", WAIT])
    children.end_orphans(ours)
    assert own.is_alive() and orphan.poll() is not None
    own.kill()
    own.join()
