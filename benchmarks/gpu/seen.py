"""Which packages the steps really import, and which of them a machine lacks.

A rehearsal notes the modules that every process of it has loaded in the end: steps say so
themselves, and Pythons that they start do by `hook/sitecustomize.py`.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from meshwright.ir.errors import PlanError

FOLDER = "MESHWRIGHT_GPU_SEEN"
"""Environment variable: where processes write what they have loaded."""
HOOK = Path(__file__).parent / "hook"
MODULES = "modules.txt"
"""Of a run: the names of all."""
WHEELS = "device-wheels"
"""Folder of what is carried, which git ignores."""
PYTHON, PLATFORM = "3.12", "manylinux_2_28_x86_64"
"""Of the machine that has the GPU."""


def note_modules() -> None:
    """Writes the modules that this process has loaded, if somebody asked."""
    folder = os.environ.get(FOLDER)
    if folder:
        names = sorted({name.partition(".")[0] for name in sys.modules})
        (Path(folder) / f"{os.getpid()}.txt").write_text("\n".join(names), encoding="utf-8")


def watch(folder: Path) -> None:
    """Has this process's children note what they load in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), before)))


def gather(folder: Path) -> set[str]:
    """What all processes have noted there."""
    found: set[str] = set()
    for path in folder.glob("*.txt"):
        found |= set(path.read_text(encoding="utf-8").split())
    return found


def distributions(modules: Iterable[str]) -> set[str]:
    """Names of the installed packages that modules are of, as their lists have them."""
    known = metadata.packages_distributions()
    return {_plain(name) for module in modules for name in known.get(module, ())}


def versions(text: str) -> dict[str, str]:
    """Name -> version of lines such as `numpy==2.4.6`; of lines without one, an empty text."""
    found = {}
    for line in text.splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            found[_plain(name)] = version
    return found


def lacking(
    modules: Iterable[str], there: Mapping[str, str], pinned: Mapping[str, str]
) -> list[str]:
    """`name==version` of what is imported and not there; PlanError where nothing pins a version.

    `there`: packages of the machine; `pinned`: versions that this project is tested with.
    """
    found = []
    for name in sorted(distributions(modules) - set(there) - _OURS):
        if name not in pinned:
            raise PlanError(f"{name} is imported and has no version in constraints.txt: add it")
        found.append(f"{name}=={pinned[name]}")
    return found


def command(wheels: Iterable[str]) -> str:
    """What brings them into the folder that is carried."""
    return (
        f"pip install --no-deps --no-compile --only-binary=:all: --target {WHEELS} "
        f"--python-version {PYTHON} --platform {PLATFORM} --platform manylinux2014_x86_64 "
        + " ".join(wheels)
    )


_OURS = frozenset({"meshwright"})


def _plain(name: str) -> str:
    """Names are the same whatever their case and dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()
