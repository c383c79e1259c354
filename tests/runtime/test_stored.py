"""Checkpoints on disk: damage is named, nothing of theirs runs, nothing of the user's goes."""

import collections
import errno
import hashlib
import json
import math
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import parts
from meshwright.runtime.checkpoint.values import decode, encode
from meshwright.runtime.record import run_dir
from meshwright.testing.handmade import Chain, batches, make_job
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.checkpoint.plans import PLANS

ONE = PLANS["one"]
STEP = "step-00000000"
SMALL = [0, 1, 1000]
"""Seeds, of places where a bit flips."""


def a_job():
    return make_job(Chain(5), ONE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    a_job().save(tmp_path)
    return tmp_path


def _train_and_save(folder: Path, steps: int, keep: int) -> None:
    job = a_job()
    for batch in batches(steps):
        job.step(batch)
        job.save(folder, keep=keep)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 to 3, all kept."""
    folder = tmp_path_factory.mktemp("several")
    alone(_train_and_save, folder, 3, 3)
    return folder


def values(job):
    return [h.tensor.detach().clone() for h in job.parts.held]


def refused(folder: Path, *words: str) -> None:
    """The load names the damage, and the job does not train on what it has half of."""
    with pytest.raises(PlanError) as caught:
        a_job().load(folder)
    for word in words:
        assert word in str(caught.value), caught.value


# What is in `latest`, and where checkpoints lie.


@pytest.mark.parametrize(
    "text",
    ["../elsewhere", "/etc", "step-1", "step-00000000/../../x", "step-00000000.old", "",
     "step-00000000\nstep-1", "x" * 10_000, "step-" + "\u0660" * 8 + ""],
)  # fmt: skip
def test_latest_names_a_step_inside(saved: Path, text: str) -> None:
    shutil.copytree(saved / STEP, saved.parent / "elsewhere", dirs_exist_ok=True)
    (saved / "latest").write_text(text)
    refused(saved, "latest says", "`step-N`")


def test_no_link_leads_out(saved: Path) -> None:
    outside = saved.parent / "outside"
    shutil.move(saved / STEP, outside)
    (saved / STEP).symlink_to(outside)
    refused(saved, "is a link")
    (saved / STEP).unlink()
    shutil.move(outside, saved / STEP)
    part = saved / STEP / "part-00000.safetensors"
    part.rename(saved / "elsewhere")
    part.symlink_to(saved / "elsewhere")
    refused(saved, "part-00000.safetensors", "link")
    (saved / "latest").unlink()
    (saved / "latest").symlink_to("/dev/zero")
    refused(saved, "latest is not a plain file")


# Damage.


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("seed", SMALL)
@pytest.mark.parametrize("name", ["part-00000.safetensors", "checkpoint.json"])
def test_a_flipped_bit_is_found(saved: Path, name: str, seed: int) -> None:
    path = saved / STEP / name
    flip(path, random.Random(seed).randrange(8 * path.stat().st_size - 8))
    refused(saved, name)


def test_damaged_data_is_named_with_its_tensor(saved: Path) -> None:
    path = saved / STEP / "part-00000.safetensors"
    flip(path, 8 * path.stat().st_size - 1)
    refused(saved, "part-00000.safetensors is damaged: the bytes of 'model/", "no sound checkpoint")


def test_a_half_loaded_job_takes_no_step(saved: Path) -> None:
    path = saved / STEP / "part-00000.safetensors"
    flip(path, 8 * path.stat().st_size - 1)
    job = a_job()
    with pytest.raises(PlanError, match="is damaged"):
        job.load(saved)
    with pytest.raises(PlanError, match="a load failed"):
        job.step(batches(1)[0])


def _truncated(step: Path, _: Path) -> None:
    os.truncate(step / "part-00000.safetensors", 100)


def _empty(step: Path, _: Path) -> None:
    (step / "part-00000.safetensors").write_bytes(b"")


def _absent(step: Path, _: Path) -> None:
    (step / "part-00000.safetensors").unlink()


def _older(step: Path, other: Path) -> None:
    shutil.copy(other / "part-00000.safetensors", step)


def _other_manifest(step: Path, other: Path) -> None:
    shutil.copy(other / "checkpoint.json", step)


def _other_step(step: Path, other: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(other, step)


def _empty_manifest(step: Path, _: Path) -> None:
    (step / "checkpoint.json").write_bytes(b"")


def _no_manifest(step: Path, _: Path) -> None:
    (step / "checkpoint.json").unlink()


def _no_folder(step: Path, _: Path) -> None:
    shutil.rmtree(step)


DAMAGE = [
    (_truncated, "it has 100 bytes"), (_empty, "it has 0 bytes"),
    (_absent, "part-00000.safetensors is missing"), (_older, "part-00000.safetensors is damaged"),
    (_other_manifest, "checkpoint.json is of step 2"), (_other_step, "is of step 2"),
    (_empty_manifest, "checkpoint.json is damaged"), (_no_manifest, "checkpoint.json is missing"),
    (_no_folder, "step-00000003 is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=lambda x: getattr(x, "__name__", ""))
def test_damage_is_named_and_the_one_before_taken(
    several: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage, words: str
) -> None:
    folder = tmp_path / "job"
    shutil.copytree(several, folder)
    damage(folder / "step-00000003", folder / "step-00000002")
    job = a_job()
    job.load(folder)
    assert job.state.step == 2
    said = capfd.readouterr().err
    assert words in said and "Going on from" in said and "step-00000002, step 2" in said
    shutil.rmtree(folder / "step-00000001")
    shutil.rmtree(folder / "step-00000002")
    refused(folder, words, "no sound checkpoint")


def _load_on_two(folder):
    job = make_job(Chain(5), PLANS["hsdp1"])
    try:
        job.load(folder)
    except PlanError as error:
        return str(error)
    return job.state.step


def test_all_ranks_agree_on_what_is_damaged(several: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(several, folder)
    path = folder / "step-00000003" / "part-00000.safetensors"
    flip(path, 8 * path.stat().st_size - 1)  # what one rank reads
    assert run_ranks(4, _load_on_two, folder) == [2] * 4
    shutil.rmtree(folder / "step-00000001")
    shutil.rmtree(folder / "step-00000002")
    found = run_ranks(4, _load_on_two, folder)
    assert len(set(found)) == 1 and "is damaged: the bytes of" in found[0]


# What a checkpoint says is data.


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def write_old(folder: Path, extra: object, job) -> Path:
    """A checkpoint as older versions wrote it, with torch's own writer."""
    held = {f"model/{h.param.fqn}": h.tensor.detach() for h in job.parts.held}
    for h in job.parts.held:
        for key, x in job.optimizer.state[h.tensor].items():
            held[f"optim/{key}/{h.param.fqn}"] = x
    settings = [{k: v for k, v in g.items() if k in ("lr", "betas", "eps", "weight_decay")}
                for g in job.optimizer.param_groups]  # fmt: skip
    plain = {
        "job.step": 7, "job.fingerprint": job.graph.fingerprint, "job.settings": settings,
        "job.extra": extra,
    }  # fmt: skip
    target = folder / "step-00000007"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state_dict_saver.save(plain | held, checkpoint_id=target, planner=planner, no_dist=True)
    (folder / "latest").write_text("step-00000007\n")
    return target


def _old_goes_on(folder: Path):
    job = a_job()
    job.step(batches(1)[0])
    write_old(folder, {"scheduler": {"last_epoch": 3, "milestones": collections.Counter([1])}}, job)
    other = make_job(Chain(5), ONE)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(other.optimizer, [5])
    other.load(folder, scheduler)
    assert other.state.step == 7 and scheduler.last_epoch == 3 and scheduler.milestones[1] == 1
    return [float(j.step(b)) for j in (job, other) for b in batches(3)[1:]]


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path: Path) -> None:
    losses = alone(_old_goes_on, tmp_path)
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("place", ["index", "value", "tensor"])
def test_an_older_checkpoint_runs_no_code(tmp_path: Path, place: str) -> None:
    job, ran = a_job(), tmp_path / "ran"
    target = write_old(tmp_path, Evil(ran) if place == "value" else {}, job)
    words = ["needs code to be read, and it was not run", "mkdir"]
    if place == "index":
        metadata = pickle.loads((target / ".metadata").read_bytes())
        metadata.planner_data = Evil(ran)
        (target / ".metadata").write_bytes(pickle.dumps(metadata))
        words = [".metadata asks for posix.mkdir", "It was not run"]
    if place == "tensor":
        (tmp_path / "evil").mkdir()
        torch.save(Evil(ran), tmp_path / "evil" / "x")
        content = (tmp_path / "evil" / "x").read_bytes()
        metadata = pickle.loads((target / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            if index.fqn.startswith("model/"):
                info.offset, info.length = 0, len(content)
                info.relative_path = "__9_9.distcp"
        (target / "__9_9.distcp").write_bytes(content)
        (target / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, *words)
    assert not ran.exists()


@pytest.mark.parametrize("seed", SMALL)
def test_a_flipped_bit_of_an_older_tensor_is_found(tmp_path: Path, seed: int) -> None:
    target = write_old(tmp_path, {}, a_job())
    metadata = pickle.loads((target / ".metadata").read_bytes())
    info = next(i for k, i in metadata.storage_data.items() if k.fqn.startswith("model/"))
    content = (target / info.relative_path).read_bytes()
    data = content.index(a_job().parts.held[0].tensor.detach().numpy().tobytes()[:16])
    flip(target / info.relative_path, 8 * data + random.Random(seed).randrange(128))
    refused(tmp_path, info.relative_path, "is damaged: the bytes of 'model/")


def test_a_manifest_that_names_other_files_is_refused(saved: Path) -> None:
    path = saved / STEP / "checkpoint.json"
    for old, new in (("part-00000.safetensors", "../../x"), ("part-00000", "/dev/zero")):
        text = path.read_text()
        data = json.loads(text.replace(old, new))
        canonical = json.dumps(data["content"], sort_keys=True, separators=(",", ":"))
        data["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
        path.write_text(json.dumps(data))
        refused(saved, "none of a checkpoint's")
        path.write_text(text)


def test_part_files_are_safetensors(saved: Path) -> None:
    with safe_open(saved / STEP / "part-00000.safetensors", "pt") as file:
        for h in a_job().parts.held:
            assert torch.equal(file.get_tensor(f"model/{h.param.fqn}"), h.tensor)


# What a scheduler keeps.


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.inf, -0.0, (1, (2, [3.5])), {1: "a", (2, 3): None}, {"$": 3}, {1, 2},
     collections.Counter([1, 1]), collections.OrderedDict(b=1, a=2), b"\x00", True, 2**70,
     collections.defaultdict(list, {"a": [1]}), torch.float16, torch.device("cpu"),
     np.float32(1 / 3), np.arange(6.0).reshape(2, 3).T, torch.tensor(3), torch.zeros(0, 3),
     torch.arange(12.0).view(3, 4).T, torch.tensor([1.5], dtype=torch.bfloat16)],
    ids=repr,
)  # fmt: skip
def test_values_come_back_exactly(value: object) -> None:
    found = decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))
    assert type(found) is type(value) and repr(found) == repr(value)


class Scheduler:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return {"inner": {"kept": [1, self.state]}}


@pytest.mark.parametrize("state", [lambda: 0, object(), torch.nn.Linear(1, 1), os.path], ids=type)
def test_what_needs_code_is_refused_before_anything_is_written(saved: Path, state: object) -> None:
    before = sorted(saved.rglob("*"))
    with pytest.raises(PlanError, match=r"the scheduler's state\.inner\.kept\[1\] is a "):
        a_job().save(saved, Scheduler(state))
    assert sorted(saved.rglob("*")) == before


def test_a_scheduler_is_not_dropped(saved: Path) -> None:
    job = a_job()
    with pytest.raises(PlanError, match="without a scheduler"):
        job.load(saved, torch.optim.lr_scheduler.StepLR(job.optimizer, 1))


# What is removed, and what is not.


def test_only_our_own_folders_are_removed(tmp_path: Path) -> None:
    job = a_job()
    for name in ("step-by-step-notes", "step-00000010-backup", "step-00000005", "step-6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("!")
    first = set(tmp_path.rglob("*"))
    job.save(tmp_path)
    assert first < set(tmp_path.rglob("*"))
    shutil.copytree(tmp_path / STEP, tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / "notes.txt").write_text("!")
    shutil.copytree(tmp_path / STEP, tmp_path / "outside")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "outside")
    shutil.copytree(tmp_path / STEP, tmp_path / "step-00000001")
    write_old(tmp_path, {}, job)
    (tmp_path / "latest").write_text(STEP)
    before = {p for p in tmp_path.rglob("*") if "step-00000001" not in p.parts}
    job.save(tmp_path)
    assert {p for p in tmp_path.rglob("*")} == before


def test_as_many_stay_as_are_kept(several: Path, tmp_path: Path) -> None:
    alone(_train_and_save, tmp_path, 4, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest", "step-00000003", "step-00000004"
    ]  # fmt: skip
    with pytest.raises(PlanError, match="keep=1"):
        a_job().save(tmp_path, keep=0)


@pytest.mark.parametrize("name", [STEP, f"{STEP}.partial", f"{STEP}.old"])
def test_what_lies_in_the_place_of_a_checkpoint_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("!")
    with pytest.raises(PlanError, match=f"{name} is in the place of the new checkpoint"):
        a_job().save(tmp_path)
    assert (tmp_path / name / "mine").read_text() == "!"


def test_a_latest_of_another_program_stays(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step10")
    with pytest.raises(PlanError, match="latest says 'global_step10'"):
        a_job().save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_what_a_crash_left_goes_with_the_next_save(tmp_path: Path) -> None:
    job = a_job()
    job.save(tmp_path)
    shutil.copytree(tmp_path / STEP, tmp_path / f"{STEP}.partial")
    shutil.copytree(tmp_path / STEP, tmp_path / f"{STEP}.old")
    shutil.copytree(tmp_path / STEP, tmp_path / "step-00000009.partial")
    job.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", STEP]


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"cannot be written: .*file"):
        a_job().save(tmp_path / "file")


def _one_rank_fails(folder):
    job = make_job(Chain(5), PLANS["zero3"])
    if job.parts.rank == 2:
        parts.write = _full
    with pytest.raises(PlanError, match="No space left on device"):
        job.save(folder)
    return True


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rank_that_cannot_write_is_told_to_all(tmp_path: Path) -> None:
    assert all(run_ranks(4, _one_rank_fails, tmp_path / "job"))


# Run directories.


def test_a_run_takes_no_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "steps_rank0.jsonl").write_text("mine")
    with pytest.raises(
        PlanError, match=r"steps_rank0.jsonl of a run whose plan\.json is not there"
    ):
        run_dir.begin(tmp_path, ONE, 0)
    assert (tmp_path / "steps_rank0.jsonl").read_text() == "mine"


def test_a_run_directory_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_dir.clear(folder)
    run_dir.begin(folder, ONE, 0)
    (folder / "steps_rank0.jsonl").write_text("")
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(PlanError, match=r"thesis.tex, which no run leaves"):
        run_dir.clear(folder)
    (folder / "thesis.tex").unlink()
    run_dir.clear(folder)
    assert not folder.exists()
