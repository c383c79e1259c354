"""The folder of a job's checkpoints: `latest` names one of the folders `step-N` in it.

Only what a marker and every file in it say is ours is ever moved or removed.
"""

import os
import re
from pathlib import Path

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import manifest
from meshwright.runtime.checkpoint.files import DamagedError, sync, write
from meshwright.runtime.checkpoint.manifest import FRAGMENT, PART

LATEST = "latest"
MARKER = "written-by-meshwright"
_STEP = re.compile(r"step-([0-9]{8,18})")
_OURS = re.compile(r"step-[0-9]{8,18}(\.old|\.partial)?")
_MARKED = "A checkpoint of meshwright. It is removed once enough newer ones are whole.\n"
_FILES = (MARKER, manifest.NAME, f"{manifest.NAME}.partial")
_LONGEST = 64


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a step's checkpoint into; PlanError if others are in its place."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:08d}"
    partial = target.with_name(f"{target.name}.partial")
    for path in (target, target.with_name(f"{target.name}.old"), partial):
        if os.path.lexists(path) and not is_ours(path):
            raise PlanError(
                f"{path} is in the place of the new checkpoint, and is not one that this version "
                "wrote: move it away, or save to another folder"
            )
    if os.path.lexists(folder / LATEST):
        named(folder)  # PlanError if it is not ours to write over
    if partial.exists():
        remove(partial)
    partial.mkdir()
    (partial / MARKER).write_text(_MARKED)
    return partial


def finish(folder: Path, partial: Path, keep: int) -> Path:
    """Makes the finished checkpoint the latest; only then do older ones go. Its folder."""
    target = partial.with_name(partial.name.removesuffix(".partial"))
    if target.exists():  # the same step again: until `latest` is written, `.old` stands for it
        older = target.with_name(f"{target.name}.old")
        if older.exists():
            remove(older)
        target.rename(older)
    partial.rename(target)
    sync(folder)
    write(folder / LATEST, target.name + "\n")
    tidy(folder, target, keep)
    return target


def tidy(folder: Path, target: Path, keep: int) -> None:
    """Removes what is ours but for the `keep` newest checkpoints up to `target`."""
    for path in _superseded(folder, target, keep):
        remove(path)


def _superseded(folder: Path, target: Path, keep: int) -> list[Path]:
    """Ours that are neither `target` nor among the `keep` newest up to it."""
    ours = [path for path in folder.glob("step-*") if path != target and is_ours(path)]
    whole = sorted((step_of(path), path) for path in ours if step_of(path) >= 0)
    older = [path for step, path in whole if step < step_of(target)]
    kept = older[max(len(older) - (keep - 1), 0) :]
    return [path for path in ours if path not in kept]


def step_of(path: Path) -> int:
    """The step in a whole checkpoint's name, else -1."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def is_ours(path: Path) -> bool:
    """Whether it is a folder that we wrote, and nobody put anything into."""
    if path.is_symlink() or not path.is_dir() or not _OURS.fullmatch(path.name):
        return False
    inside = list(path.iterdir())
    return any(file.name == MARKER for file in inside) and all(
        file.is_file() and not file.is_symlink()
        and (file.name in _FILES or PART.fullmatch(file.name) or FRAGMENT.fullmatch(file.name))
        for file in inside
    )  # fmt: skip


def remove(path: Path) -> None:
    """Removes a folder of ours, its marker last; one that holds anything else stays."""
    assert is_ours(path), path
    files = sorted(path.iterdir(), key=lambda file: (file.name == MARKER, file.name))
    for file in files:
        file.unlink()
    path.rmdir()


def named(folder: Path) -> str:
    """The folder that `latest` names; PlanError unless it is a `step-N` directly inside."""
    path = folder / LATEST
    if not os.path.lexists(path):
        raise PlanError(f"{folder} holds no checkpoint: there is no file {path}")
    if path.is_symlink() or not path.is_file():
        raise PlanError(f"{path} is not a plain file; it must hold the name of a folder `step-N`")
    with path.open("rb") as file:
        text = file.read(_LONGEST).decode("utf-8", "replace").removesuffix("\n")
    if not _STEP.fullmatch(text):
        raise PlanError(
            f"{path} says {text!r}; it must name a folder `step-N` of 8 digits or more directly "
            f"inside {folder}"
        )
    return text


def candidates(folder: Path) -> list[Path]:
    """The newest checkpoint, then those that may stand for it if it is damaged, newest first."""
    newest = folder / named(folder)
    older = newest.with_name(f"{newest.name}.old")
    if not os.path.lexists(newest) and is_ours(older):
        return [older]
    others = [p for p in folder.glob("step-*") if is_ours(p) and (p / manifest.NAME).is_file()]
    before = sorted((p for p in others if 0 <= step_of(p) < step_of(newest)), key=step_of)
    return [newest, *reversed(before)]


def check(path: Path) -> None:
    """PlanError if a checkpoint's folder is a link; DamagedError if it is none at all."""
    if path.is_symlink():
        raise PlanError(f"{path} is a link: a checkpoint is a folder directly inside its parent")
    if not path.is_dir():
        raise DamagedError(f"{path} is missing, and {LATEST} names it")
