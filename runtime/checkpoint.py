"""Saves a job so that any plan for the same model can go on from it, on any number of ranks.

A folder holds `step-N/` (torch's distributed checkpoint format) and `latest`, a file that names it.
`latest` is replaced in one move once everything is written, so a crash at any time leaves a
checkpoint that loads.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Kind
from meshwright.ir.nesting import whole_runs
from meshwright.runtime.boxes import Boxed, BoxLoadPlanner, BoxSavePlanner
from meshwright.runtime.export import persistent
from meshwright.runtime.gradsync.base import Held
from meshwright.runtime.pieces import Piece, pieces
from meshwright.runtime.unread import boxed

if TYPE_CHECKING:
    from meshwright.runtime.job import Job

LATEST = "latest"


def save(job: "Job", folder: Path, extra: dict[str, Any]) -> Path:
    """Writes the job's state; all ranks call it. `extra` is rank 0's (a scheduler's state, say)."""
    name = f"step-{job.state.step:08d}"
    target, partial = folder / name, folder / f"{name}.partial"
    if job.parts.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    _barrier()
    plain = {
        "job.step": job.state.step,
        "job.fingerprint": job.graph.fingerprint,
        "job.settings": _settings(job.optimizer),
        "job.extra": extra,
    }
    content: dict[str, Boxed] = {}
    for stage in reversed(job.parts.stages):  # the first stage of a shared parameter writes it
        content |= _contents(job, stage)
    content |= job.unread.saved(persistent(job.model), job.parts.rank == 0)
    planner = BoxSavePlanner(content, job.parts.rank == 0)
    state_dict_saver.save(
        plain, checkpoint_id=partial, planner=planner, no_dist=job.plan.world_size == 1
    )
    if job.parts.rank == 0:
        _switch(folder, partial, target)
    _barrier()
    return target


def _switch(folder: Path, partial: Path, target: Path) -> None:
    """Makes the finished checkpoint the latest; only then do older ones go."""
    if target.exists():  # the same step again, and `latest` names it: keep it until the switch
        older = folder / f"{target.name}.old"
        shutil.rmtree(older, ignore_errors=True)
        shutil.copytree(target, older, copy_function=os.link)
        _write_latest(folder, older.name)
        shutil.rmtree(target)
    partial.rename(target)
    _write_latest(folder, target.name)
    for other in folder.glob("step-*"):
        if other != target:
            shutil.rmtree(other)


def _write_latest(folder: Path, name: str) -> None:
    temporary = folder / f"{LATEST}.partial"
    temporary.write_text(name + "\n")
    os.replace(temporary, folder / LATEST)


def load(job: "Job", folder: Path) -> dict[str, Any]:
    """Restores what `save` wrote, under any plan; returns its `extra`."""
    latest = folder / LATEST
    if not latest.is_file():
        raise PlanError(f"{folder} holds no checkpoint: there is no file {latest}")
    source = folder / latest.read_text().strip()
    metadata = FileSystemReader(source).read_metadata()
    plain: dict[str, Any] = {
        "job.step": 0, "job.fingerprint": "", "job.settings": [], "job.extra": {},
    }  # fmt: skip
    alone = job.plan.world_size == 1
    state_dict_loader.load(plain, checkpoint_id=source, planner=BoxLoadPlanner({}), no_dist=alone)
    if plain["job.fingerprint"] != job.graph.fingerprint:
        raise PlanError(
            f"{source} is a checkpoint of another model ({plain['job.fingerprint'][:12]}, not "
            f"{job.graph.fingerprint[:12]})"
        )
    _make_room(job, metadata)
    # One pass per stage of a rank: two stages may hold copies of one parameter.
    own = list(job.parts.stages)
    for number in range(max(map(len, _stages_by_rank(job).values()))):
        content = _contents(job, own[number]) if number < len(own) else {}
        state_dict_loader.load(
            {}, checkpoint_id=source, planner=BoxLoadPlanner(content), no_dist=alone
        )
    room = job.unread.room(metadata.state_dict_metadata)
    state_dict_loader.load(
        {}, checkpoint_id=source, planner=BoxLoadPlanner(boxed(room)), no_dist=alone
    )
    job.unread.fill(room)
    for stage in job.parts.stages.values():
        stage.sync.publish()
    job.state.step = plain["job.step"]
    _restore_settings(job.optimizer, plain["job.settings"])
    job.missing.clear()
    extra: dict[str, Any] = plain["job.extra"]
    return extra


def _stages_by_rank(job: "Job") -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, stage in enumerate(job.plan.stages):
        for rank in stage.devices:
            found.setdefault(rank, []).append(index)
    return found


def _contents(job: "Job", stage: int) -> dict[str, Boxed]:
    """What this rank has of a stage, by its name in the checkpoint."""
    parts = job.parts
    counted = {id(h) for h in parts.counted}
    found = {}
    for h in parts.stages[stage].sync.held:
        mine = id(h) in counted
        found[f"model/{h.param.fqn}"] = _boxed(job, h, h.tensor, mine)
        for key, value in job.optimizer.state.get(h.tensor, {}).items():
            if isinstance(value, Tensor):
                found[f"optim/{key}/{h.param.fqn}"] = _boxed(job, h, value, mine)
    for name, tensor in parts.tensors[stage].items():
        known = job.graph.tensors[name]
        if known.kind is Kind.BUFFER:
            whole = pieces(whole_runs(known.shape))
            found[f"model/{known.fqn}"] = Boxed(
                known.shape, tuple((p, tensor) for p in whole), parts.owners[name] == parts.rank
            )
    return found


def _boxed(job: "Job", held: Held, x: Tensor, writes: bool) -> Boxed:
    """A tensor of the held one's shape, or a single number that belongs to it."""
    if x.shape != held.tensor.shape:
        if x.ndim:
            raise PlanError(
                f"the optimizer keeps a tensor of shape {tuple(x.shape)} for {held.param.fqn!r}, "
                f"which has {tuple(held.tensor.shape)}: such a state cannot be cut for another plan"
            )
        return Boxed((), ((Piece((), (), ()), x),), writes)
    shape = held.param.global_shape
    boxes = pieces(held.param.runs, held.rows)
    return Boxed(shape, tuple((piece, x) for piece in boxes), writes)


def _make_room(job: "Job", metadata: Metadata) -> None:
    """Gives the optimizer the state tensors that the checkpoint has, to be filled."""
    by_fqn: dict[str, list[Held]] = {}
    for h in job.parts.held:
        if h.param.requires_grad and h.tensor.numel():
            by_fqn.setdefault(h.param.fqn, []).append(h)
    on_device = any(g.get("fused") or g.get("capturable") for g in job.optimizer.param_groups)
    for name, stored in metadata.state_dict_metadata.items():
        if not name.startswith("optim/") or not isinstance(stored, TensorStorageMetadata):
            continue
        _, key, fqn = name.split("/", 2)
        dtype = stored.properties.dtype
        for h in by_fqn.get(fqn, []):
            if key == "step" or tuple(stored.size) != h.param.global_shape:
                device = h.tensor.device if on_device else torch.device("cpu")
                room = torch.zeros((), dtype=dtype, device=device)
            else:
                room = torch.zeros_like(h.tensor, dtype=dtype, requires_grad=False)
            job.optimizer.state[h.tensor][key] = room


_HOW = ("params", "fused", "foreach", "capturable", "differentiable", "maximize")
"""Settings of how to compute, which the new job decides for itself."""


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k not in _HOW} for g in optimizer.param_groups]


def _restore_settings(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise PlanError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one "
            f"{len(optimizer.param_groups)}"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update(settings)


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
