"""A job that is started again goes on from what it left in memory, if that is newer and sound."""

import fcntl
import shutil

import pytest
import torch

from meshwright.ir.torch_private import RESTARTS
from meshwright.running import memory_folder
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job import memory_saves
from meshwright.runtime.job.memory_saves import MemorySaves
from meshwright.runtime.job.saver import Saver
from meshwright.testing.handmade import Chain, batches, make_job
from tests.runtime.checkpoint.plans import PLANS

STEPS = 6


class _Dies(Exception):
    pass


def _train(folder, last, resume=None, steps=STEPS):
    """Trains until it dies after so many steps; the steps taken, and the job."""
    job, taken = make_job(Chain(5), PLANS["one"]), {}
    try:
        with Saver(job, folder, every=3, resume=resume) as saver:
            for batch in saver.batches(batches(steps)):
                taken[job.state.step] = float(job.step(batch))
                saver.stepped()
                for writer in (saver._writer, saver._memory and saver._memory._writer):
                    if writer:
                        writer.wait()
                if job.state.step == last:
                    raise _Dies
    except _Dies:
        pass
    return taken, job


def _started(monkeypatch, times):
    monkeypatch.setenv(RESTARTS, str(times))


def test_memory_is_used_if_it_is_newer_and_sound(tmp_path, monkeypatch, capsys):
    whole, job = _train(tmp_path / "whole", None)
    wanted = full_state(job)
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(memory_saves.FOLDER, str(memory))
    monkeypatch.setattr(memory_saves, "LEAST_S", 0.0)
    monkeypatch.setattr(memory_saves, "SHARE", 1e9)
    first, _ = _train(tmp_path / "disk", 5)
    # It is asked for after a step, and done after a later one, where the disk is not written.
    (kept,) = [int(path.name.removeprefix("step-")) for path in memory.glob("step-*")]
    assert kept in (4, 5)
    assert (tmp_path / "disk/latest").read_text() == "step-00000003\n"
    _started(monkeypatch, 1)
    shutil.copytree(tmp_path / "disk", tmp_path / "done")
    assert _train(tmp_path / "done", None, steps=kept)[0] == {}
    assert (tmp_path / "done/latest").read_text() == f"step-{kept:08d}\n", "no step, but a save"
    rest, job = _train(tmp_path / "disk", None)
    assert len(rest) == STEPS - kept and {**first, **rest} == pytest.approx(whole, rel=1e-12)
    for name, value in wanted.items():
        torch.testing.assert_close(full_state(job)[name], value, rtol=1e-12, atol=1e-14)
    assert (tmp_path / "disk/latest").read_text() == "step-00000006\n", "the disk has the end"


def test_what_is_damaged_in_memory_is_taken_from_disk(tmp_path, monkeypatch, capsys):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(memory_saves.FOLDER, str(memory))
    monkeypatch.setattr(memory_saves, "LEAST_S", 0.0)
    monkeypatch.setattr(memory_saves, "SHARE", 1e9)
    _train(tmp_path / "disk", 5)
    (part,) = memory.glob("step-00000004/part-*")
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    _started(monkeypatch, 1)
    rest, _ = _train(tmp_path / "disk", None)
    assert len(rest) == 3
    assert "Going on from" in (said := capsys.readouterr().err) and "step 3" in said
    # What another supervisor's job left would not be asked for at all.
    _started(monkeypatch, 0)
    assert len(_train(tmp_path / "other", None)[0]) == STEPS


def test_a_folder_that_is_taken_away_or_full_holds_nothing_up(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(memory_saves.time, "monotonic", lambda: now[0])
    saves = MemorySaves(make_job(Chain(5), PLANS["one"]), tmp_path / "gone")
    now[0] += 2.0
    assert not saves.is_due(), "nowhere to write"
    (tmp_path / "gone").mkdir()
    assert saves.is_due()
    free = memory_saves.psutil.virtual_memory()
    with monkeypatch.context() as full:
        full.setattr(memory_saves.psutil, "virtual_memory", lambda: free._replace(available=9))
        assert not saves.is_due(), "no memory for it"
    now[0] -= 1.5
    assert not saves.is_due(), "each second at most"
    now[0], saves._held_s = now[0] + 98.0, 1.0
    assert not saves.is_due(), "they hold up training for a hundredth of the time"
    now[0] += 2.0
    assert saves.is_due()
    monkeypatch.setattr(type(saves._writer), "is_writing", True)
    assert not saves.is_due(), "a step would wait for the one before"


def test_the_folder_goes_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path)
    left = tmp_path / "meshwright-killed"
    held = tmp_path / "meshwright-held"
    for folder in (left, held, tmp_path / "meshwright-foreign", tmp_path / "other"):
        folder.mkdir()
    for folder in (left, held):
        (folder / "lock").touch()
    with (held / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with memory_folder.memory_folder() as path:
            assert path is not None and path.is_dir() and not left.exists() and held.exists()
            with memory_folder.memory_folder() as other:
                assert other is not None and other != path and path.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "meshwright-foreign", "meshwright-held", "other"
    ]  # fmt: skip
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path / "nothing")
    with memory_folder.memory_folder() as path:
        assert path is None
