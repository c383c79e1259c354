"""A job that saves as it goes, is asked to leave, and goes on as if it had not been."""

import json
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.errors import NonFinite, PlanError
from meshwright.runtime.checkpoint import parts
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job import save_interval
from meshwright.runtime.job.save_interval import chosen_interval_s
from meshwright.runtime.job.saver import SaveInterval, Saver
from meshwright.runtime.world.agreement import Agreement, stride
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.testing.handmade import Chain, batches, make_job
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.checkpoint.plans import PLANS

STEPS = 6


class Loader:
    """Batches that know where they are."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < STEPS:
            self.at += 1
            yield batches(STEPS)[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def _train(plan, folder, placed, asked_at=None, every=2):
    """Trains to the end, or until rank 1 (or the only one) asks; losses, state, and the exit."""
    job = make_job(Chain(5), PLANS[plan])
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    losses, code = {}, 0
    source = Loader() if placed else batches(STEPS)
    try:
        with Saver(job, folder, every=every, keep=2, scheduler=scheduler, resume=True) as saver:
            for batch in saver.batches(source):
                losses[job.state.step] = float(job.step(batch))
                scheduler.step()
                if job.state.step == asked_at and job.parts.rank == len(job.plan.stages) - 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                saver.stepped()
    except SystemExit as error:
        code = error.code
    return losses, full_state(job) if not code else None, code


@pytest.mark.parametrize("placed", [False, True])
def test_a_job_that_was_asked_to_leave_goes_on_under_another_plan(tmp_path, placed):
    whole, wanted, _ = alone(_train, "one", None, placed)
    first = run_ranks(4, _train, "pipeline", tmp_path, placed, 3)
    assert {code for *_, code in first} == {RETRY}
    assert {tuple(losses) for losses, *_ in first} == {(1, 2, 3, 4)}, "all leave after one step"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000004",
    ]
    (rest, state, code), *_ = run_ranks(4, _train, "zero3", tmp_path, placed)
    assert code == 0 and list(rest) == [5, 6]
    for step, loss in {**first[0][0], **rest}.items():
        assert loss == pytest.approx(whole[step], rel=1e-12)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def _by_clock(folder):
    job = make_job(Chain(5), PLANS["hsdp1"])
    with Saver(job, folder, every="0.001s", keep=9) as saver:
        for batch in saver.batches(batches(STEPS)):
            job.step(batch)
            saver.stepped()
            saver._writer.wait()
    return sorted(p.name for p in folder.glob("step-*"))


def test_all_ranks_save_when_the_first_ones_clock_says_so(tmp_path):
    found = run_ranks(4, _by_clock, tmp_path)
    # What is asked after a step is done after the next one; the last step is always saved.
    assert found == [[f"step-{n:08d}" for n in (2, 4, 6)]] * 4


def _full_disk(folder):
    job = make_job(Chain(5), PLANS["zero3"])
    if job.parts.rank == 2:
        parts.write = _no_room
    try:
        with Saver(job, folder, every=1) as saver:
            for batch in saver.batches(batches(STEPS)):
                job.step(batch)
                saver.stepped()
                saver.finish()  # all ranks hear of it here, and none is stuck in a step
    except PlanError as error:
        job.failures.close()
        return str(error), "".join(error.__notes__)
    return "went on", ""


def _no_room(*_):
    raise OSError(28, "No space left on device")


def test_a_writer_that_fails_ends_the_job_with_the_cause(tmp_path):
    for text, notes in run_ranks(4, _full_disk, tmp_path):
        assert "could not be written" in text and "No space left" in text, (text, notes)
    assert not (tmp_path / "latest").exists()


def test_a_folder_with_a_checkpoint_is_not_written_over_unasked(tmp_path, monkeypatch):
    job = make_job(Chain(5), PLANS["one"])
    job.step(batches(1)[0])
    job.save(tmp_path)
    again = make_job(Chain(5), PLANS["one"])
    with pytest.raises(PlanError, match="resume=True"):
        Saver(again, tmp_path)
    next(iter(again.parts.stages.values())).comm.seed = 9
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # as torchrun --max-restarts sets
    assert Saver(again, tmp_path).resumed and (again.state.step, again.seed) == (1, 0)
    other = Saver(again, tmp_path)
    again.state.samples = 36
    with pytest.raises(PlanError, match="36 samples, no multiple of the plan's global batch of 24"):
        next(other.batches(batches(1)))
    manifest = json.loads((tmp_path / "step-00000001" / "checkpoint.json").read_text())
    assert manifest["content"]["extra"] == {"precision": "fp64", "samples": 24, "seed": 0}


def test_the_next_step_changes_nothing_of_what_is_written():
    job = make_job(Chain(5), PLANS["one"])
    job.step(batches(1)[0])
    found = job.snapshot()
    before = [box.content.clone() for box in found.boxes]
    job.step(batches(2)[1])
    assert len(before) > 10
    assert all(torch.equal(x, box.content) for x, box in zip(before, found.boxes, strict=True))


class BadLoader(Loader):
    """From its third batch on no numbers."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch if self.at < 3 else tuple(x * float("nan") for x in batch)


def test_a_step_that_stays_bad_ends_the_job(tmp_path):
    job = make_job(Chain(5), PLANS["one"])
    job.on_nonfinite = "back"
    source, bad = BadLoader(), 0
    with Saver(job, tmp_path, every=1) as saver, pytest.raises(NonFinite):
        for batch in saver.batches(source):
            try:
                job.step(batch)
                saver.stepped()
            except NonFinite as error:
                bad += 1
                saver.go_back(error)
                assert job.state.data == {"at": 3}, "the bad batch is not given again"
    assert bad == 2 and source.at == 4


@pytest.mark.parametrize("text", ["", "0", "10x", "-5", "0m", "1e3", "ten"])
def test_an_interval_is_steps_or_time(text):
    assert SaveInterval.parse("100") == SaveInterval(steps=100)
    assert SaveInterval.parse("1.5h") == SaveInterval(seconds=5400.0)
    with pytest.raises(PlanError, match="10m"):
        SaveInterval.parse(text)


def test_saves_may_be_as_rare_as_is_best(tmp_path, monkeypatch):
    """The first one soon; then what it took says when: among so few steps not again."""
    monkeypatch.setattr(save_interval, "FIRST_S", 1e-9)
    job = make_job(Chain(5), PLANS["one"])
    with Saver(job, tmp_path, every="auto", keep=9) as saver:
        for batch in saver.batches(batches(STEPS)):
            job.step(batch)
            saver.stepped()
            saver._writer.wait()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000006"]
    assert saver._writer.took_s > 0 and saver._held_s > 0
    for held_s in (0.1, 1.0):  # Young's formula, where failures are rare beside saves
        young = (2 * held_s * 419**-1 * 54 * 86_400 * 2) ** 0.5
        assert chosen_interval_s(held_s, 1.0, 8192) == pytest.approx(young, rel=0.01)
    assert chosen_interval_s(1e5, 1.0, 8192) == 3600.0
    assert chosen_interval_s(1.0, 4000.0, 8192) == 4000.0, "one is written at a time"
    with pytest.raises(PlanError, match="nearest is a time"):
        Saver(job, None, every="auto", save=lambda: None)


def test_what_is_asked_second_has_to_be_asked_again():
    one = Agreement(1, late=True)
    assert stride(4) == stride(4096) == 1 and stride(16384) == 3
    assert one.ask(3, "save") and one.due(4) == ""
    # Nor is what is asked for again and again put off by that, as by a clock that is late.
    assert not one.ask(4, "save") and not one.ask(4, "leave")
    assert one.due(5) == "save" and one.due(6) == ""
    assert one.ask(6, "leave") and one.due(8) == "leave"


def _asked_late():
    """As by a launcher that is killed: its store goes first, then the signal comes."""
    with Saver(make_job(Chain(5), PLANS["one"]), None) as saver:
        others = saver.asked_before(RuntimeError("no product"))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return others, saver.asked_before(dist.DistNetworkError("gone")), saver.asked_by


def test_a_rank_is_asked_to_end_when_its_store_has_gone():
    assert alone(_asked_late) == (False, True, signal.SIGTERM)
