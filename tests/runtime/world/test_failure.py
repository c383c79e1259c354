"""A failing job ends soon, with its first cause named, and leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.comm.opening import STORE_OPERATION_S
from meshwright.ir.errors import NonFinite, PlanError
from meshwright.runtime.step.executor import RankProgress
from meshwright.runtime.world import failure
from meshwright.runtime.world.failure import (
    BEAT_S,
    DEAD_S,
    Failures,
    beat_s,
    first_failure,
    looks_at_all,
)
from meshwright.runtime.world.standing import dumps, standing
from meshwright.testing.handmade import Chain, batches, make_job, plan_of
from tests.runtime.small_jobs import gpipe, stage

PLAN = plan_of(
    (stage(0, 1, (0, 1), shares=(3, 3), zero=2), stage(2, 3, (2,), shares=(6,))), gpipe(2, 4), 4
)
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from tests.runtime.world.test_failure import one_rank
one_rank(sys.argv[1], *sys.argv[2:])
"""
# Three copies of one process that has imported all: they go on, and end, as separate ones do.
FORKED = """
import json, os, sys
from tests.runtime.world.test_failure import one_rank

fault, folder = sys.argv[1:]
ranks = []
for rank in range(3):
    if pid := os.fork():
        ranks.append(pid)
        continue
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    one_rank(fault, f"{folder}/store", str(rank))
    break
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]))
"""


def one_rank(fault: str, store: str = "", rank: str = "") -> None:
    """A rank that trains, and in step 2 rank 1 has the fault, in the third block-0 forward."""
    torch.set_num_threads(1)
    if store:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, 3), rank=int(rank), world_size=3
        )
    else:
        dist.init_process_group("gloo")
    job = make_job(Chain(4), PLAN, hang_s=3.0)
    module = job.parts.stages.get(0)
    for number, batch in enumerate(batches(5)):
        if number == 2 and dist.get_rank() == 1:
            module.blocks[0].register_forward_pre_hook(lambda *_: _fault(fault, job))
        job.step(batch)
    job.close()
    dist.destroy_process_group()  # Gloo's threads may abort a process that ends with them
    print("finished", flush=True)


def _fault(fault, job):
    if job.parts.stages[0].comm.microbatch != 2:
        return
    if fault == "raise":
        raise ArithmeticError("the seventh seal")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _plain(fault, folder):
    """Starts three plain processes; their exit codes and what they wrote to stderr."""
    command = [sys.executable, "-c", FORKED, fault, str(folder)]
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        codes = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return codes, [(folder / f"stderr{rank}").read_text() for rank in range(3)]


def test_without_a_fault_all_finish(tmp_path):
    codes, errors = _plain("none", tmp_path)
    assert codes == [0, 0, 0], errors


CAUSE = {
    "raise": "rank 1, step 2, action 0F2: ArithmeticError: the seventh seal",
    "kill": "rank 1 died",
    "hang": "rank 1, step 2, action 0F2 (running): no progress for 3 s",
}


@pytest.mark.sampled
@pytest.mark.parametrize("fault", CAUSE)
def test_plain_processes_end_with_the_cause(fault, tmp_path):
    start = time.monotonic()
    codes, errors = _plain(fault, tmp_path)
    assert time.monotonic() - start < 40  # 30 s and the start of an interpreter
    assert all(code != 0 for code in codes), codes
    assert any(CAUSE[fault] in error for error in errors), errors


@pytest.mark.sampled
@pytest.mark.parametrize("fault", CAUSE)
def test_torchrun_ends_with_the_cause(fault, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "--log-dir", str(tmp_path / "logs"), str(script), fault]
    start = time.monotonic()
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert time.monotonic() - start < 45
    assert done.returncode != 0
    if fault == "raise":
        files = list((tmp_path / "logs").rglob("error.json"))
        messages = [json.loads(file.read_text())["message"]["message"] for file in files]
        assert any("the seventh seal" in message for message in messages), done.stderr
        assert "rank 1, step 2, action 0F2" in done.stderr
    if fault == "hang":
        assert CAUSE[fault] in done.stderr
    assert not _alive(str(script)), "orphans"


def _alive(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_beats_of_large_jobs_leave_the_store_idle():
    assert beat_s(3) == beat_s(1024) == BEAT_S
    for world in (512, 4096, 16384):
        operations_per_s = 4 * world / beat_s(world)
        assert operations_per_s * STORE_OPERATION_S <= 0.1 + 1e-9
        lookers = sum(looks_at_all(rank, world) for rank in range(world))
        assert 8 <= lookers <= 9 and looks_at_all(0, world)
    assert all(looks_at_all(rank, 8) for rank in range(8)), "in small jobs all look"


class _Between:
    """Before each look of a watch, something happens; then it ends."""

    def __init__(self, *events):
        self.events, self.waited_s = list(events), []

    def wait(self, seconds):
        self.waited_s.append(seconds)
        self.events.pop(0)()
        return not self.events

    def is_set(self):
        return True


def _watched(monkeypatch, hang_s, progress, *events):
    """What rank 0 of two publishes at its looks, between each two of which its clock says that
    minutes have passed: the whole machine stood still."""
    store, clock = dist.HashStore(), count(step=300)
    monkeypatch.setattr(failure, "launcher_store", lambda: store)
    monkeypatch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = Failures(0, 2, progress, hang_s)
    found.close()
    found._closed = _Between(*(partial(event, store) for event in (*events, lambda _: None)))
    found._watch()
    return first_failure(store)


def test_a_pause_of_the_whole_machine_is_no_rank_that_died(monkeypatch):
    progress, looks = RankProgress(entered=1), int(DEAD_S / BEAT_S)
    numbers = count()

    def beats(store):
        store.set("meshwright/beat/1", dumps(standing(RankProgress(7)), next(numbers)))

    quiet = [lambda _: None] * (looks - 1)
    assert not _watched(monkeypatch, 1e9, progress, *quiet, *quiet), "it has not come yet"
    assert not _watched(monkeypatch, 1e9, progress, beats, *quiet, beats, *quiet)
    found = _watched(monkeypatch, 1e9, progress, beats, *quiet, quiet[0])
    assert (found.kind, found.rank, found.step) == ("died", 1, 7)
    assert found.text.endswith("no sign of life for 12 s")


def test_a_pause_of_the_whole_machine_is_no_hang(monkeypatch):
    progress, numbers = RankProgress(entered=1), count()

    def stands(store):
        store.set("meshwright/beat/1", dumps(standing(progress), next(numbers)))

    def goes_on(store):
        progress.at(1, "0F0", "running")
        stands(store)

    hang_s = 4 * BEAT_S
    once = [goes_on, *[stands] * 4]
    assert not _watched(monkeypatch, hang_s, progress, *once, *once)
    found = _watched(monkeypatch, hang_s, progress, *once, stands)
    assert found.kind == "hung" and "no progress for 4 s" in found.text


def test_a_rank_that_is_alone_tells_a_launcher_of_its_first_step_at_once(monkeypatch):
    """A job that is left with one rank would else have taken no step, whenever that is killed."""
    store, progress = dist.HashStore(), RankProgress()
    monkeypatch.setattr(failure, "launcher_store", lambda: store)
    found = Failures(0, 1, progress, 1e9)
    found.close()
    told = []

    def looks(_):
        told.append(failure.standing_of(store, 0).step)

    def steps(_):
        progress.at(7, "0F0", "running")

    events = (looks, looks, steps, looks)  # parts of the first beat; then it has beaten
    found._closed = _Between(*(partial(event, store) for event in events))
    found._watch()
    assert told == [0, 0, 7]
    assert found._closed.waited_s == [BEAT_S / 10] * 3 + [BEAT_S]
    monkeypatch.setattr(failure, "launcher_store", lambda: None)
    assert Failures(0, 1, progress, 1e9)._thread is None, "nobody is there to be told"


def test_what_all_ranks_raise_together_ends_nothing_where_they_catch_it(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(failure, "launcher_store", lambda: store)
    found = Failures(0, 2, RankProgress(entered=1, step=4), 1e9)
    last = PlanError("no checkpoint").on_all_ranks()
    for error in (NonFinite("an export of no numbers").on_all_ranks(), last):
        with pytest.raises(type(error)), found.guard():
            raise error
        assert first_failure(store) is None
    monkeypatch.setattr(sys, "last_exc", last, raising=False)  # by which it leaves
    found.close()
    ended = first_failure(store)
    assert ended.step == 4
    assert ended.text == "rank 0, outside a step, before step 4: PlanError: no checkpoint"
    store = dist.HashStore()
    found = Failures(0, 2, RankProgress(), 1e9)
    with pytest.raises(PlanError), found.guard():
        raise PlanError("of this rank alone")
    assert first_failure(store).error == "PlanError: of this rank alone"
    found.close()
