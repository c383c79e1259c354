"""Steps that hang, die, print garbage or eat memory: the rest goes on, and results say so."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.results import DayRun, Result, load
from benchmarks.gpu.runner import Devices, run_one, run_steps
from benchmarks.gpu.step import Place, Step
from tests.benchmarks.gpu.days import day

ROOT = Path(__file__).parents[3]
HEAD = """
import os, signal, subprocess, sys, time
from benchmarks.gpu.step import Step

def run(place):
    yield "before", 1
{body}

STEP = Step(name="{name}", does="", order={order}, limit_s={limit}, least_s=.1, run=run,
            imports=(), gpus=0{more})
"""
BAD = {
    "hang": "(place.out / 'pid').write_text(str(subprocess.Popen(['sleep', '86399'],"
    " start_new_session=True).pid)); time.sleep(99)",
    "killed": "os.kill(os.getpid(), signal.SIGSEGV)",
    "raises": "raise ValueError('no good')",
    "silent": "os._exit(0)",
    "leaves": "sys.exit(0)",
    "garbage": "os.write(1, bytes(range(256)) * 99); yield 'x', object()",
    "nan": "yield 'x', float('nan')",
    "scribbles": "(place.out / 'now.jsonl').open('ab').write(b'\\xff\\x00[1,\\n[\"fact\"')",
    "floods": "b = b'x' * 2**20\n    while True: os.write(2, b)",
    "eats": "held = []\n    while True: held.append(bytearray(b'x' * 2**24)); time.sleep(.001)",
    "good": "yield 'after', 2.5",
}
BROKEN = "import nobody_has_this\n"
"""A file of a step that needs a package which the machine lacks."""
MORE = {"eats": ", most_bytes=2**29"}
LIMIT = {"hang": 1.5}
SAY = ("leaves", "garbage", "nan", "scribbles")
"""Steps that fault in what they say. That is read alike however they were started, so a Python of
its own for each of these, seconds to start, would show nothing."""


def write_steps(folder: Path) -> None:
    for order, (name, body) in enumerate(BAD.items()):
        text = HEAD.format(body=f"    {body}", name=name, order=order, more=MORE.get(name, ""),
                           limit=LIMIT.get(name, 30))  # fmt: skip
        (folder / f"{name}.py").write_text(text)
    (folder / "broken.py").write_text(BROKEN)


@pytest.fixture(scope="module", params=["forked", "anew"])
def bad(request, tmp_path_factory):
    """What became of the bad steps, and the folder of their run."""
    steps, out = tmp_path_factory.mktemp("steps"), tmp_path_factory.mktemp("out")
    write_steps(steps)
    anew = ["--anew"] if request.param == "anew" else []
    names = [name for name in BAD if not (anew and name in SAY)]
    found = day(out, *anew, "--only", "broken", *names, steps=steps)
    assert set(found) == {"broken", *names}
    return found, out


def test_each_bad_step_says_how_it_ended_and_the_rest_goes_on(bad):
    found, _ = bad
    status = {
        "hang": "out of time", "killed": "died", "raises": "failed", "silent": "died",
        "leaves": "failed", "garbage": "failed", "nan": "failed", "scribbles": "done",
        "floods": "failed", "eats": "out of memory", "good": "done",
        "broken": "failed",
    }  # fmt: skip
    assert all(one["status"] == status[name] for name, one in found.items())
    assert found["killed"]["why"] == "ended by SIGSEGV"
    assert found["raises"]["why"] == "ValueError: no good"
    assert "it was killed after" in found["hang"]["why"]
    assert "No module named 'nobody_has_this'" in found["broken"]["why"]
    if "scribbles" in found:
        assert "lines of facts could not be read" in found["scribbles"]["why"]


def test_what_was_found_before_stays(bad):
    found, _ = bad
    assert all(found[name]["facts"]["before"] == 1 for name in found if name != "broken")
    assert found["good"]["facts"] == {"before": 1, "after": 2.5}


def test_nothing_of_a_step_outlives_it(bad):
    _, out = bad
    assert not psutil.pid_exists(int((out / "pid").read_text()))
    assert {path.name for path in out.iterdir()} <= {
        "results.json", "log.txt", "modules.txt", "pid",
    }  # fmt: skip
    assert (out / "log.txt").stat().st_size < 2**20


def _sleeping(name: str, least_s: float) -> Step:
    def run(place):
        yield "before", 1
        time.sleep(30)

    return Step(name=name, does="", order=1, limit_s=30, least_s=least_s, gpus=0, run=run)


def test_late_steps_are_trimmed_and_left_out_when_time_is_short(tmp_path):
    place = Place(out=tmp_path, device="cpu", rehearsal=True, plans=tmp_path, until=0.0)
    run = DayRun(begun="", device="cpu", rehearsal=True, budget_s=100.0)
    steps = [_sleeping("trimmed", 0.1), _sleeping("late", 1.0)]
    told: list[Result] = []
    begun = time.monotonic() - 98.5
    found = run_steps(steps, place, run, Devices(0, True), begun, told.append)
    first, second = found.results
    assert first.status == "out of time" and first.limit_s <= 1.5 and first.facts == {"before": 1}
    assert second.status == "left out" and second.why == "0 s were left, it needs 1"
    assert load(tmp_path) == found and told == [first, second]


def test_a_step_that_needs_more_gpus_is_left_out_but_in_a_rehearsal(tmp_path):
    place = Place(out=tmp_path, device="cuda", plans=tmp_path, until=0.0)
    run = DayRun(begun="", device="cuda", rehearsal=False, budget_s=9.0)
    step = replace(_sleeping("pairs", 0.1), gpus=2)
    (one,) = run_steps([step], place, run, Devices(1, True), time.monotonic(), print).results
    assert one.why == "it needs 2 GPUs, the machine has 1"


def test_a_step_that_does_not_go_when_it_is_killed_does_not_hold_up_the_rest(tmp_path, monkeypatch):
    """As a process does that hangs in a driver."""
    place = Place(out=tmp_path, device="cpu", rehearsal=True, plans=tmp_path, until=0.0)
    (tmp_path / "log.txt").write_bytes(b"")
    held: list[int] = []
    monkeypatch.setattr(runner, "_GOING_S", 0.3)
    with monkeypatch.context() as deaf:
        for name in ("kill", "killpg"):
            deaf.setattr(os, name, lambda pid, number: held.append(pid))
        stuck = run_one(replace(_sleeping("stuck", 0.1), limit_s=0.5), place, 9.0)
    os.kill(held[0], signal.SIGKILL)
    os.waitpid(held[0], 0)
    assert stuck.status == "out of time" and "could not be killed" in stuck.why
    assert stuck.facts == {"before": 1} and stuck.seconds < 5
