"""Saves a job so that any plan for the same model can go on from it, on any number of ranks.

A folder holds `step-N/` and `latest`, a file that names it. `latest` is replaced in one move once
everything is written, so a crash at any time leaves a checkpoint that loads. A checkpoint is
safetensors files, one of each rank, and a manifest in JSON with a sum of every piece; nothing in it
is code. What a load finds damaged is named, and an older checkpoint taken if there is a sound one.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.ir.comm.by_store import Aside, of_all, to_first
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Kind
from meshwright.ir.layout.nesting import whole_runs
from meshwright.ir.precision import in_which_traced
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint import manifest, parts, sync_state, torch_format
from meshwright.runtime.checkpoint.boxes import Boxed, copy, to_fill, to_write
from meshwright.runtime.checkpoint.export import persistent
from meshwright.runtime.checkpoint.fence import check_held
from meshwright.runtime.checkpoint.files import DamagedError, write
from meshwright.runtime.checkpoint.manifest import (
    Manifest,
    PartFile,
    StoredTensor,
    SyncValues,
    Wanted,
)
from meshwright.runtime.checkpoint.optimizer_state import OptimizerStates, put_numbers_back
from meshwright.runtime.checkpoint.parts import Box, Written
from meshwright.runtime.checkpoint.piece_files import InFolder
from meshwright.runtime.checkpoint.remembered import Remembered
from meshwright.runtime.checkpoint.shard_boxes import pieces
from meshwright.runtime.checkpoint.values import decode, dtype_named, encode
from meshwright.runtime.job.unread import boxed

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What one rank writes of a checkpoint, and what the manifest says beside tensors."""

    step: int
    model: str
    settings: Any
    extra: Mapping[str, Any]
    boxes: Sequence[Box]
    sync: Mapping[str, SyncValues]

    def on_host(self) -> "Snapshot":
        """The same, of tensors that the next step does not touch."""
        boxes = [replace(box, content=_copied(box.content)) for box in self.boxes]
        return replace(self, boxes=boxes)

    def in_folder(self, folder: Path) -> Path:
        """Where the checkpoint will be."""
        return folder / f"step-{self.step:08d}"


RankPart = tuple[str, PartFile, list[Written], Mapping[str, SyncValues]]
"""What a rank has written: name and size of its file, boxes in it, what its forms keep."""


def _copied(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def snapshot(job: "Job", extra: Mapping[str, Any]) -> Snapshot:
    """Finds what this rank would write; all ranks call it. PlanError, and nothing changed, if there
    is something that only code could bring back."""
    settings, kept = encode(_settings(job.optimizer), "the optimizer's settings"), _kept(extra)
    alone, first = job.plan.world_size == 1, job.parts.rank == 0
    with told(alone, "the checkpoint cannot be written"):
        sync_tensors, sync_rest = sync_state.kept(job)
    content: dict[str, Boxed] = {}
    for stage in reversed(job.parts.stages):  # the first stage of a shared parameter writes it
        content |= _contents(job, stage)
    content |= job.unread.saved(persistent(job.model), first) | sync_tensors
    return Snapshot(
        job.state.step, job.graph.fingerprint, settings, kept, to_write(content), sync_rest
    )


def save(job: "Job", folder: Path, extra: Mapping[str, Any], keep: int = 1) -> Path:
    """Writes the job's state; all ranks call it. `extra` is rank 0's (a scheduler's state, say).

    PlanError, and nothing changed, if `extra` holds what only code could bring back. `keep` says
    how many checkpoints stay, this one included.
    """
    check_keep(keep)
    alone = job.plan.world_size == 1
    return write_whole(snapshot(job, extra), folder, job.parts.rank, keep, alone=alone)


def write_whole(
    found: Snapshot, folder: Path, rank: int, keep: int, *, alone: bool, aside: Aside | None = None
) -> Path:
    """Writes a checkpoint and makes it the newest one; all ranks call it, on threads of their own
    with an `aside`. What fails on one of them is a PlanError on all."""
    first, path = rank == 0, found.in_folder(folder)
    partial = folder / f"{path.name}.partial"
    with told(alone, f"{folder}: the checkpoint cannot be written", aside):
        if first:
            check_held()
            folders.begin(folder, found.step)
    failed = f"{partial}: the checkpoint could not be written"
    name = f"part-{rank:05d}.safetensors"
    with told(alone, failed, aside):
        own = name, *parts.write(found.boxes, partial / name), found.sync
    everyone = [own] if alone else to_first(own, aside)
    with told(alone, failed, aside):
        if first:
            _finish(found, folder, partial, everyone, keep)
    return path


def check_keep(keep: int) -> None:
    """PlanError unless at least one checkpoint is to stay."""
    if keep < 1:
        raise PlanError(f"keep={keep}: at least the checkpoint that is saved stays, keep=1")


def _finish(
    found: Snapshot, folder: Path, partial: Path, everyone: Sequence[RankPart], keep: int
) -> None:
    """Writes the manifest over what all ranks have written, and makes it the newest checkpoint."""
    made = Manifest(
        found.step, found.model, found.settings, found.extra,
        {name: file for name, file, _, _ in everyone}, stored_tensors(everyone),
        {where: entry for *_, rest in everyone for where, entry in rest.items()},
    )  # fmt: skip
    write(partial / manifest.NAME, manifest.dumps(made))
    check_held()  # again: to write may have taken long
    folders.finish(folder, partial, keep)


def _kept(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` as JSON; what it cannot keep is named as the user knows it."""
    return {key: encode(value, f"the {key}'s state") for key, value in extra.items()}


def stored_tensors(everyone: Sequence[RankPart]) -> dict[str, StoredTensor]:
    """All tensors by name. Of a number that several ranks wrote, the first counts."""
    found: dict[str, dict[tuple[int, ...], Written]] = {}
    for _, _, boxes, _ in everyone:
        for box in boxes:
            found.setdefault(box.name, {}).setdefault(box.piece.offsets, box)
    made = {}
    for name, by_place in found.items():
        first = next(iter(by_place.values()))
        kinds = sorted({f"{box.dtype} of {list(box.shape)}" for box in by_place.values()})
        if len(kinds) > 1:
            raise PlanError(
                f"ranks keep {name!r} in different ways, {' and '.join(kinds)}, so no checkpoint "
                "can join them: the optimizer goes by how much of a parameter a rank has; with "
                "zero=0 all ranks have as much"
            )
        stored = tuple(box.piece for box in by_place.values())
        made[name] = StoredTensor(first.dtype, first.shape, stored)
    return made


@contextmanager
def told(alone: bool, what: str, aside: Aside | None = None) -> Iterator[None]:
    """What fails inside on one rank, on disk or by a rule, is a PlanError on every rank."""
    text, damaged = "", False
    try:
        yield
    except PlanError as error:
        text, damaged = str(error), isinstance(error, DamagedError)
    except OSError as error:
        text = f"{what}: {error}"
    texts = [(text, damaged)] if alone else of_all((text, damaged), aside)
    wrong = [(said, bad) for said, bad in texts if said]
    if wrong:
        rest = f" (and on {len(wrong) - 1} more ranks)" * (len(wrong) > 1)
        kind = DamagedError if all(bad for _, bad in wrong) else PlanError
        raise kind(wrong[0][0] + rest).on_all_ranks()


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is read, of our format or of torch's."""

    path: Path
    step: int
    model: str
    settings: Any
    extra: Any
    tensors: Mapping[str, StoredTensor]
    sync: Mapping[str, SyncValues]
    read_all: Callable[[Sequence[Wanted]], Iterator[tuple[int, Tensor]]]


def load(
    job: "Job", folder: Path, *, drop_sync_state: bool = False, newer: Remembered | None = None
) -> dict[str, Any]:
    """Restores what `save` wrote, under any plan; returns its `extra`. What is `newer`, in memory,
    is tried first.

    A checkpoint with damaged bytes is named on stderr and the newest sound one before it taken; if
    there is none, PlanError says what is damaged, and the job takes no step before a load succeeds.
    """
    damage: list[str] = []
    alone = job.plan.world_size == 1
    for path in _candidates(folder, newer):
        in_memory = newer is not None and path == newer.path
        try:
            with told(alone, str(path)):
                source = _remembered(newer) if newer is not None and in_memory else _opened(path)
                _fill(job, replace(source, sync={}) if drop_sync_state else source)
        except DamagedError as error:
            damage.append(str(error))
            continue
        if (damage or in_memory) and job.parts.rank == 0:
            why = f"{'; '.join(damage)}. " if damage else ""
            print(
                f"meshwright: {why}Going on from {path}, step {source.step}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        for stage in job.parts.stages.values():
            stage.sync.written()
        job.state.step = source.step
        job.missing.clear()
        extra: dict[str, Any] = source.extra
        return extra
    text = "; ".join(damage) + ". There is no sound checkpoint before it"
    raise PlanError(text).on_all_ranks()


def _candidates(folder: Path, newer: Remembered | None) -> Iterator[Path]:
    if newer is not None:
        yield newer.path
        if not os.path.lexists(folder / folders.LATEST):
            return
    yield from folders.candidates(folder)


def _remembered(newer: Remembered) -> _Source:
    found = newer.whole
    return _Source(
        newer.path, found.step, found.model, decode(found.settings), decode(found.extra),
        found.tensors, found.sync, lambda wanted: parts.read_all(newer, wanted),
    )  # fmt: skip


def _opened(path: Path) -> _Source:
    folders.check(path)
    if not (path / manifest.NAME).exists() and (path / torch_format.INDEX).exists():
        old = torch_format.read(path)
        values = [old.value(f"job.{key}") for key in ("step", "fingerprint", "settings", "extra")]
        step, model, settings, extra = values
        return _Source(path, step, model, settings, extra, old.tensors, {}, old.read_all)
    found = manifest.read(path)
    if found.step != folders.step_of(path.with_name(path.name.removesuffix(".old"))):
        raise DamagedError(f"{path / manifest.NAME} is of step {found.step}: it belongs elsewhere")
    for name, part in found.files.items():
        parts.check(path / name, part)
    return _Source(
        path, found.step, found.model, decode(found.settings), decode(found.extra), found.tensors,
        found.sync, lambda wanted: parts.read_all(InFolder(path), wanted),
    )  # fmt: skip


def _is_of(source: _Source, job: "Job") -> bool:
    """Whether a checkpoint is of the job's model: of its graph, or where that is traced in another
    precision, of its parameters."""
    traced = in_which_traced(source.extra.get("precision", ""))
    if traced == in_which_traced(job.plan.precision):
        return source.model == job.graph.fingerprint
    known = {name: tensor.shape for name, tensor in source.tensors.items()}
    return all(known.get(f"model/{x.fqn}") == x.shape for x in job.graph.parameters)


def _fill(job: "Job", source: _Source) -> None:
    """Fills all that the job has; half filled, it has no values."""
    if not _is_of(source, job):
        raise PlanError(
            f"{source.path} is a checkpoint of another model ({source.model[:12]}, not "
            f"{job.graph.fingerprint[:12]})"
        )
    _check_settings(job.optimizer, source.settings)
    _make_room(job, source.tensors)
    unread = job.unread.room(source.tensors)
    sync, sync_tensors = sync_state.room(job, source.sync, source.tensors)
    contents = [_contents(job, stage) for stage in job.parts.stages]
    fills = to_fill([*contents, boxed(unread), sync_tensors], source.tensors)
    job.missing |= {fill.name.removeprefix("model/") for fill in fills}
    for number, read in source.read_all([fill.wanted for fill in fills]):
        copy(fills[number], read)
    for state in job.optimizer.state.values():
        put_numbers_back(state)
    job.unread.fill(unread)
    for index, state in sync.items():
        job.parts.stages[index].sync.load(state)
    for group, settings in zip(job.optimizer.param_groups, source.settings, strict=True):
        group.update(settings)


def _contents(job: "Job", stage: int) -> dict[str, Boxed]:
    """What this rank has of a stage, by its name in the checkpoint."""
    parts, states = job.parts, OptimizerStates(job.optimizer)
    counted = {id(h) for h in parts.counted(parts.held)}
    found = {}
    for h in parts.stages[stage].sync.held:
        mine = id(h) in counted
        boxes = pieces(h.param.runs, h.rows)
        found[f"model/{h.param.fqn}"] = Boxed(
            h.param.global_shape, tuple((box, h.tensor) for box in boxes), mine
        )
        for path, boxed_state in states.boxed(h, writes=mine).items():
            found[f"optim/{path}/{h.param.fqn}"] = boxed_state
    for name, tensor in parts.tensors[stage].items():
        known = job.graph.tensors[name]
        if known.kind is Kind.BUFFER:
            whole = pieces(whole_runs(known.shape))
            found[f"model/{known.fqn}"] = Boxed(
                known.shape, tuple((p, tensor) for p in whole), parts.owners[name] == parts.rank
            )
    return found


def _make_room(job: "Job", stored: Mapping[str, StoredTensor]) -> None:
    """Gives the optimizer the state tensors that the checkpoint has, to be filled."""
    found: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for name, tensor in stored.items():
        if name.startswith("optim/"):
            _, path, fqn = name.split("/", 2)
            found.setdefault(fqn, {})[path] = dtype_named(tensor.dtype), tensor.shape
    states = OptimizerStates(job.optimizer)
    for h in job.parts.held:
        if h.param.requires_grad and h.tensor.numel() and h.param.fqn in found:
            states.make_room(h, found[h.param.fqn])


_HOW = ("params", "fused", "foreach", "capturable", "differentiable", "maximize")
"""Settings of how to compute, which the new job decides for itself."""


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k not in _HOW} for g in optimizer.param_groups]


def _check_settings(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    if not isinstance(saved, list) or len(saved) != len(optimizer.param_groups):
        number = len(saved) if isinstance(saved, list) else saved
        raise PlanError(
            f"the checkpoint's optimizer has {number} parameter groups, this one "
            f"{len(optimizer.param_groups)}"
        )
