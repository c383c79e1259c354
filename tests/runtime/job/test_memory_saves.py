"""A job that is started again goes on from what it left in memory, if that is newer and sound."""

import fcntl
import os
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import RESTARTS
from meshwright.running import memory_folder
from meshwright.running.memory_server import MemoryServer
from meshwright.runtime.checkpoint import memory_writes, node_memory
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.checkpoint.node_memory import MEMORY, NodeMemory
from meshwright.runtime.checkpoint.remembered import newest
from meshwright.runtime.job import memory_saves
from meshwright.runtime.job.memory_saves import MemorySaves
from meshwright.runtime.job.saver import Saver
from meshwright.testing.handmade import Chain, batches, make_job, plan_of
from meshwright.testing.spawn import run_ranks
from tests.runtime.checkpoint.plans import PLANS
from tests.runtime.small_jobs import gpipe, stage

STEPS = 6


class _Dies(Exception):
    pass


def _train(folder, last, resume=None, steps=STEPS, plan=PLANS["one"]):
    """Trains until it dies after so many steps; the steps taken, and the job."""
    job, taken = make_job(Chain(5), plan), {}
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
    monkeypatch.setenv(MEMORY, NodeMemory(memory, "0").dumps())
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
    monkeypatch.setenv(MEMORY, NodeMemory(memory, "0").dumps())
    monkeypatch.setattr(memory_saves, "LEAST_S", 0.0)
    monkeypatch.setattr(memory_saves, "SHARE", 1e9)
    _train(tmp_path / "disk", 5)
    (part,) = memory.glob("step-00000004/part-*.safetensors")
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


THREE = plan_of((stage(0, 4, (0, 1, 2), shares=(4,) * 3, zero=3),), gpipe(1, 2), 2)
TWO = plan_of((stage(0, 4, (0, 1), shares=(6, 6), zero=1),), gpipe(1, 2), 2)
START, NEXT = "000000-", "000001-"


def _on_node(folder, memories, plan, last):
    """A rank, which is a node of its own."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", MEMORY: memories[rank].dumps()}
    taken, job = _train(folder, last, plan=plan)
    state = full_state(job) if last is None else None
    return taken, state, job.state.step


def _memories(servers, start, nodes):
    """Of nodes in a ring."""
    folders, places = zip(*((folder, server.place(n, "127.0.0.1")) for n, (folder, server)
                            in enumerate(servers)), strict=True)  # fmt: skip
    return [
        NodeMemory(folders[n], start, n, nodes[(i + 1) % len(nodes)],
                   tuple(place for place in places if place.node != n))
        for i, n in enumerate(nodes)
    ]  # fmt: skip


def test_a_node_that_dies_takes_nothing_along(tmp_path, monkeypatch, capfd):
    """Three nodes, the disk has step 3: two go on from what the third one had in the next one's
    memory, under another plan, as one process does that never stopped."""
    whole, job = _train(tmp_path / "whole", None)
    wanted = full_state(job)
    monkeypatch.setattr(memory_saves, "LEAST_S", 0.0)
    monkeypatch.setattr(memory_saves, "SHARE", 1e9)
    with ExitStack() as stack:
        servers = []
        for node in range(3):
            (folder := tmp_path / f"node-{node}").mkdir()
            servers.append((folder, stack.enter_context(MemoryServer(folder))))
            servers[-1][1].accept(START)
        three = _memories(servers, START, [0, 1, 2])
        ranks = run_ranks(3, _on_node, tmp_path / "disk", three, THREE, 5)
        assert ranks[0][2] == 5 and (tmp_path / "disk/latest").read_text() == "step-00000003\n"
        (kept,) = [int(path.name.removeprefix("step-")) for path in servers[0][0].glob("step-*")]
        assert kept in (4, 5)
        kept_there = servers[0][0].glob("step-*/*.safetensors")
        assert sorted(path.stem for path in kept_there) == ["part-00000", "part-00002"]
        place = three[0].others[0]
        for secret, start, name in (
            ("", START, "step-00000009.partial/part-00000.safetensors"),
            (place.secret, NEXT, "step-00000009.partial/part-00000.safetensors"),
            (place.secret, START, "../node-1/step-00000009.partial/part-00000.safetensors"),
            (place.secret, START, f"step-{kept:08d}/part-00001.safetensors"),
            (place.secret, START, "step-00000009.partial/part-00000.safetensors"),  # not begun
        ):
            with pytest.raises(OSError, match="node 1"):
                replace(place, secret=secret).put(start, name, tmp_path / "disk/latest")
        with pytest.raises(OSError, match="no file that is given"):
            place.read_text(f"step-{kept:08d}/../../disk/latest")
        shutil.rmtree(servers[2][0])
        servers[2][1].__exit__(None, None, None)
        for _, server in servers[:2]:
            server.accept(NEXT)
        _started(monkeypatch, 1)
        alone = replace(three[0], others=())
        assert newest(alone, 3) is None, "node 0 has the parts of ranks 0 and 2 alone"
        two = _memories(servers, NEXT, [0, 1])
        shutil.copytree(tmp_path / "disk", tmp_path / "disk-of-two")
        rest = run_ranks(2, _on_node, tmp_path / "disk-of-two", two, TWO, None)
    said = capfd.readouterr().err
    assert "nobody has the parts of ranks 1" in said and f"step {kept}\n" in said
    for taken, state, _ in rest:
        assert sorted(taken) == list(range(kept + 1, STEPS + 1))
        assert {**ranks[0][0], **taken} == pytest.approx(whole, rel=1e-12)
        for name, value in wanted.items() if state else ():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
    assert rest[0][1]


def test_there_is_room_for_what_comes_to_each_node():
    """Ranks of nodes 0, 0 and 1, which have a copy of each other; of 4 bytes each."""

    def fits(first, other, neighbours=(1, 0)):
        nodes, free = (0, 0, 1), (first, first, other)
        return memory_writes._all_have_room(
            [(node, neighbours[node], 4, left) for node, left in zip(nodes, free, strict=True)]
        )

    assert fits(12, 12) and not fits(11, 99) and not fits(99, 11)
    assert fits(8, 4, (-1, -1)) and not fits(7, 99, (-1, -1)) and not fits(99, 3, (-1, -1))


def test_two_states_of_one_step_are_not_taken_for_one(tmp_path):
    """A job that went back saves a step again, and may end when one of two nodes has it."""
    (tmp_path / "a").mkdir()
    saves = MemorySaves(make_job(Chain(5), PLANS["one"]), NodeMemory(tmp_path / "a", "0"))
    for copy in ("first", "second"):
        saves.save(None)
        saves.finish()
        shutil.copytree(tmp_path / "a", tmp_path / copy)
    (first,), (second,) = (node_memory.held(tmp_path / name) for name in ("first", "second"))
    assert (first.step, first.ranks, first.files) == (second.step, second.ranks, second.files)
    assert first.save != second.save


def test_the_one_before_goes_when_all_have_the_new_one(tmp_path, monkeypatch):
    seen, meet = [], memory_writes.told

    def steps():
        return [path.name for path in sorted(tmp_path.glob("step-*"))]

    @contextmanager
    def told(*given):
        with meet(*given):
            yield
        seen.append(steps())

    monkeypatch.setattr(memory_writes, "told", told)
    job = make_job(Chain(5), PLANS["one"])
    saves = MemorySaves(job, NodeMemory(tmp_path, "0"))
    for batch in batches(2):
        job.step(batch)
        saves.save(None)
        saves.finish()
    assert seen[-1] == ["step-00000001", "step-00000002"], "another rank may not have the new one"
    assert steps() == ["step-00000002"]


def test_a_folder_that_is_taken_away_or_full_holds_nothing_up(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(memory_saves.time, "monotonic", lambda: now[0])
    saves = MemorySaves(make_job(Chain(5), PLANS["one"]), NodeMemory(tmp_path / "gone", "0"))
    now[0] += 2.0
    assert not saves.is_due(), "nowhere to write"
    (tmp_path / "gone").mkdir()
    assert saves.is_due()
    free = node_memory.psutil.virtual_memory()
    with monkeypatch.context() as full:
        full.setattr(node_memory.psutil, "virtual_memory", lambda: free._replace(available=9))
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
    (tmp_path / "meshwright-pipe").mkdir()
    os.mkfifo(tmp_path / "meshwright-pipe/lock")  # somebody else's: who opens it would wait
    with (held / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with memory_folder.memory_folder() as path:
            assert path is not None and path.is_dir() and not left.exists() and held.exists()
            with memory_folder.memory_folder() as other:
                assert other is not None and other != path and path.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "meshwright-foreign", "meshwright-held", "meshwright-pipe", "other"
    ]  # fmt: skip
    with pytest.raises(PlanError, match="none of neighbour, machine, off; nearest is 'neighbour'"):
        memory_folder.check_memory_saves("neighbor")
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path / "nothing")
    with memory_folder.memory_folder() as path:
        assert path is None
