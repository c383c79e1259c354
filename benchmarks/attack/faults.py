"""Faults: ranks that hang, die and leave, signals, checkpoints damaged or made by others."""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import meshwright as mw
from benchmarks.attack.faulty_ranks import (
    HANG_S,
    LAYOUTS,
    Net,
    cause,
    inputs,
    said_by_the_other,
)
from benchmarks.attack.result import Result
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.world.children import GRACE_S

FLIPS = 200
STEP = "step-00000001"
PART, MANIFEST, INDEX = "part-00000.safetensors", "checkpoint.json", ".metadata"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL")
TARGETS = ("run", "rank 0", "rank 1")
GONE_S = GRACE_S + 30.0
"""What is left is killed after the first part of it."""
GPT2 = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)

Check = Callable[[Path], str]
"""Attacks in an empty folder; what happened. AssertionError says what did not hold."""


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Every fault at 100 percent, fewer of each kind below; each in a folder of its own."""
    chosen = random.Random(seed)
    kinds: tuple[list[tuple[str, Check]], ...] = (
        [(f"damage: {name}", partial(_damaged, damage)) for name, damage in DAMAGE.items()],
        [(f"latest: {text[:20]!r}", partial(_latest, text)) for text in LATEST],
        [(f"flip {n}", partial(_flipped, chosen.random(), chosen.random())) for n in range(FLIPS)],
        [(f"old flip {n}", partial(_flipped_old, chosen.random())) for n in range(FLIPS // 2)],
        [(f"code in {place}", partial(_evil, place)) for place in ("index", "value", "tensor")],
        [("folders of the user", _kept)],
        [(f"{fault} of rank {rank} under {layout}", partial(_faulty, layout, fault, rank))
         for layout, fault, rank in product(LAYOUTS, HANG_S, (0, 1))],
        [(f"{name} to {target}", partial(_signalled, name, target))
         for name, target in product(SIGNALS, TARGETS)],
    )  # fmt: skip
    for kind in kinds:
        for name, check in chosen.sample(kind, max(1, len(kind) * size // 100)):
            yield _result(name, check)


def _result(name: str, check: Check) -> Result:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            held, what = True, check(Path(folder))
        except AssertionError as error:
            held, what = False, str(error)
        except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            held, what = False, f"{type(error).__name__}: {error}"
    return Result(name, held, what, time.monotonic() - start)


# Checkpoints.


@cache
def one_process() -> tuple[Graph, Plan]:
    """The step traced, and its plan for one process."""
    graph = mw.trace(Net(), inputs())
    problem = make_problem(graph, mw.Cluster.local(1), precision="fp64")
    return graph, build_plan(problem, uniform_choice(problem))


def a_job(steps: int = 0) -> mw.Job:
    """A job in this process, after so many steps."""
    graph, plan = one_process()
    job = mw.compile(Net(), plan, optimizer="adam", lr=0.1, graph=graph)
    for _ in range(steps):
        job.step(inputs())
    return job


def _saved(folder: Path, steps: int = 1) -> dict[str, torch.Tensor]:
    job = a_job()
    for _ in range(steps):
        job.step(inputs())
        job.save(folder, keep=steps)
    return _state(job)


def _state(job: mw.Job) -> dict[str, torch.Tensor]:
    found = {}
    for h in job.parts.held:
        found[h.param.fqn] = h.tensor.detach().clone()
        for key, value in job.optimizer.state[h.tensor].items():
            found[f"{h.param.fqn}/{key}"] = value.clone()
    return found


def _load(folder: Path, wanted: dict[str, torch.Tensor], word: str) -> str:
    """Loads: exactly what was saved, or a PlanError with the word in it."""
    job = a_job()
    try:
        job.load(folder)
    except PlanError as error:
        assert word in str(error), f"{word!r} is not named: {error}"
        return f"refused: {error}"
    found = _state(job)
    assert found.keys() == wanted.keys(), "a state is missing, and nothing was said"
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{name} is not what was saved: silently wrong"
    return "equal"


def _flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    bit = int(share * 8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _flipped(which: float, share: float, folder: Path) -> str:
    wanted = _saved(folder)
    name = PART if which < 0.7 else MANIFEST
    _flip(folder / STEP / name, share)
    return _load(folder, wanted, name)


def _flipped_old(share: float, folder: Path) -> str:
    wanted = write_old(folder)
    _flip(folder / STEP / "__0_0.distcp", share)
    return _load(folder, wanted, "__0_0.distcp")


def _latest(text: str, folder: Path) -> str:
    _saved(folder / "job")
    shutil.copytree(folder / "job" / STEP, folder / "elsewhere")
    (folder / "job" / "latest").write_text(text)
    found = _load(folder / "job", {}, "step-N")
    assert found != "equal", "it was followed"
    return found


LATEST = ("../elsewhere", "/etc", "", "step-1", "step-00000001/../../elsewhere", "x" * 100_000,
          "step-00000001\x00", "step-00000001.old", ".", "latest")  # fmt: skip


def _copied(name: str, step: Path, other: Path) -> None:
    shutil.copy(other / name, step / name)


def _replaced(name: str, content: bytes, step: Path, other: Path) -> None:
    (step / name).write_bytes(content)


def _removed(name: str, step: Path, other: Path) -> None:
    (step / name).unlink()


def _truncated(name: str, share: float, step: Path, other: Path) -> None:
    os.truncate(step / name, int((step / name).stat().st_size * share))


def _lengthened(name: str, step: Path, other: Path) -> None:
    with (step / name).open("ab") as file:
        file.write(b"\0" * 8)


def _linked(target: str, name: str, step: Path, other: Path) -> None:
    (step / name).unlink()
    (step / name).symlink_to(target)


def _pipe(name: str, step: Path, other: Path) -> None:
    (step / name).unlink()
    os.mkfifo(step / name)


def _folder_of_other(step: Path, other: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(other, step)


def _folder_linked(step: Path, other: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to(other)


def _folder_removed(step: Path, other: Path) -> None:
    shutil.rmtree(step)


Damage = Callable[[Path, Path], None]
"""Damages a checkpoint's folder; the second is that of the step before."""
DAMAGE: dict[str, Damage] = {
    **{f"{n}: {w}": partial(f, n) for n in (PART, MANIFEST) for w, f in {
        "removed": _removed, "of the step before": _copied, "a pipe": _pipe,
    }.items()},
    **{f"{n}: cut to {share:.0%}": (lambda n=n, s=share: partial(_truncated, n, s))()
       for n in (PART, MANIFEST) for share in (0.0, 0.1, 0.5, 0.99)},
    **{f"{n}: a link to {to}": (lambda n=n, to=to: partial(_linked, to, n))()
       for n in (PART, MANIFEST) for to in ("/dev/zero", "../step-00000001/" + PART)},
    f"{PART}: lengthened": partial(_lengthened, PART),
    f"{MANIFEST}: deep": partial(_replaced, MANIFEST, b"[" * 200_000),
    f"{MANIFEST}: zeros": partial(_replaced, MANIFEST, bytes(1000)),
    f"{MANIFEST}: another object": partial(_replaced, MANIFEST, b'{"format": 3}'),
    "the folder: removed": _folder_removed, "the folder: of the step before": _folder_of_other,
    "the folder: a link": _folder_linked,
}  # fmt: skip


def _damaged(damage: Damage, folder: Path) -> str:
    """With an older one the job goes on from that, without it the damage is an error; a link in the
    place of the folder is refused in both cases."""
    before, path = _saved(folder / "before"), folder / "job"
    _saved(path, 2)
    damage(path / "step-00000002", path / STEP)
    word = "step-00000002"
    with_older = _load(path, before, word)
    if path.joinpath("step-00000002").is_symlink():
        assert with_older != "equal", "the link was followed"
        return with_older
    assert with_older == "equal", with_older
    shutil.rmtree(path / STEP)
    alone = _load(path, {}, word)
    assert alone != "equal", "the damage was not seen"
    return alone


def write_old(folder: Path, extra: Any = None) -> dict[str, torch.Tensor]:
    """A checkpoint as older versions wrote it, with torch's own writer; what it holds."""
    job = a_job(1)
    held = {}
    for h in job.parts.held:
        held[f"model/{h.param.fqn}"] = h.tensor.detach()
        for key, value in job.optimizer.state[h.tensor].items():
            held[f"optim/{key}/{h.param.fqn}"] = value
    group = job.optimizer.param_groups[0]
    plain = {
        "job.step": 1, "job.fingerprint": job.graph.fingerprint,
        "job.settings": [{"lr": group["lr"], "betas": group["betas"]}], "job.extra": extra or 0,
    }  # fmt: skip
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state_dict_saver.save(plain | held, checkpoint_id=folder / STEP, planner=planner, no_dist=True)
    (folder / "latest").write_text(STEP)
    return _state(job)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _evil(place: str, folder: Path) -> str:
    ran = folder / "ran"
    write_old(folder / "job", Evil(ran) if place == "value" else None)
    step = folder / "job" / STEP
    index = pickle.loads((step / INDEX).read_bytes())
    if place == "index":
        index.planner_data = Evil(ran)
    if place == "tensor":
        torch.save(Evil(ran), step / "__9_9.distcp")
        for key, info in index.storage_data.items():
            if key.fqn.startswith("model/"):
                info.relative_path, info.offset = "__9_9.distcp", 0
                info.length = (step / "__9_9.distcp").stat().st_size
    (step / INDEX).write_bytes(pickle.dumps(index))
    found = _load(folder / "job", {}, "run")
    assert found != "equal" and not ran.exists(), "code ran"
    return found


def _kept(folder: Path) -> str:
    """What is not ours stays, whatever its name."""
    job = a_job()
    names = ("step-by-step-notes", "step-00000010-backup", "step-00000005", "step-6", "step-")
    for name in names:
        (folder / name).mkdir()
        (folder / name / "mine").write_text("!")
    theirs = set(folder.rglob("*"))
    job.save(folder)
    shutil.copytree(folder / "step-00000000", folder / "step-00000003")
    (folder / "step-00000003" / "thesis.tex").write_text("!")
    theirs |= set((folder / "step-00000003").rglob("*"))
    job.step(inputs())
    job.save(folder)
    gone = {p for p in theirs if not p.exists()}
    assert not gone, f"removed: {sorted(p.name for p in gone)}"
    return "kept"


# Ranks and signals.


def _faulty(layout: str, fault: str, rank: int, folder: Path) -> str:
    said, wanted = said_by_the_other(layout, fault, folder, rank), cause(layout, fault, rank)
    assert wanted in said, f"{wanted!r} is not in {said!r}"
    return wanted


@cache
def _plan_of_two() -> str:
    """A plan file for two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "meshwright", "search", GPT2, "--cluster", "local:2"]
        command += ["--global-batch", "4", "--precision", "fp32", "--pin", "dp_shard=2"]
        subprocess.run([*command, "-o", str(path)], check=True, capture_output=True)
        return path.read_text()


def _signalled(name: str, target: str, folder: Path) -> str:
    """All processes of `meshwright run` are gone after a signal to one of them."""
    plan, log = folder / "plan.json", folder / "run" / "metrics.jsonl"
    plan.write_text(_plan_of_two())
    command = [sys.executable, "-m", "meshwright", "run", str(plan), GPT2, "--steps", "1000000"]
    command += ["-o", str(folder / "run"), "--log", "jsonl"]
    parent = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=_heed_signals
    )
    processes = [psutil.Process(parent.pid)]
    try:
        _wait_for(lambda: log.exists() and log.read_text().count("\n") > 2, "it does not start")
        processes += processes[0].children(recursive=True)
        assert len(processes) == 3, f"{len(processes)} processes"
        ranks = {p.environ().get("RANK"): p for p in processes[1:] if "RANK" in p.environ()}
        of = {"run": processes[0]} | {f"rank {r}": p for r, p in ranks.items()}
        of[target].send_signal(signal.Signals[name])
        start = time.monotonic()
        _wait_for(lambda: parent.poll() is not None, "meshwright run goes on", GONE_S)
        _wait_for(lambda: not any(p.is_running() for p in processes[1:]), "ranks go on", GONE_S)
        code = parent.wait()
        assert code != 0, "exit code 0"
        if target == "run" and name != "SIGKILL":
            assert code == 128 + signal.Signals[name], f"exit code {code}"
        return f"gone after {time.monotonic() - start:.1f} s, exit code {code}"
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
        parent.wait()


def _heed_signals() -> None:
    """Undoes what nohup and a shell's & do, which `meshwright run` respects."""
    for name in SIGNALS[:-1]:
        signal.signal(signal.Signals[name], signal.SIG_DFL)


def _wait_for(condition: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)
